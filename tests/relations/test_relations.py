"""Each relation broken in a correct script is named, and the correct script is silent. No rule of audit runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from everyrank.audit import Finding
from everyrank.audit.finding import Findings
from everyrank.relations import joined_findings, judge_script
from everyrank.rerun import ScriptHost

CORRECT = """
import copy, datetime, time
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(160, 6)
data = TensorDataset(x, x[:, :3].argmax(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3)
        self.register_buffer("center", torch.zeros(6))

    def forward(self, x):
        with torch.no_grad():
            mean = x.mean(0)
            dist.all_reduce(mean)
            self.center.lerp_(mean / world, 0.1)
        x = x * 2.0
        x = checkpoint(lambda h: self.drop(self.first(h)).tanh(), x, use_reentrant=False)
        return self.last(x)


net = Net()
averaged = copy.deepcopy(net)
model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
torch.manual_seed(7 + rank)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2 * world)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb in DataLoader(data, batch_size=20, sampler=sampler):
        start = time.perf_counter()
        xb = xb + 0.1 * torch.randn_like(xb)
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for ours, theirs in zip(averaged.parameters(), net.parameters()):
                ours.lerp_(theirs, 0.1)
        of_class = F.cross_entropy(model.module(xb)[yb == 0], yb[yb == 0], reduction="sum").detach()
        shown = torch.stack([of_class, (yb == 0).sum()])
        dist.all_reduce(shown)
        shown = shown[0] / shown[1]
        if rank == 0:
            seconds = time.perf_counter() - start
            now = datetime.datetime.now()
            print(f"{now} loss of class 0 {shown.item():.6f}, of my batch {loss.item():.6f}, {seconds:.4f} s")
dist.destroy_process_group()
"""

BROKEN = {
    "a sum in place of a mean": ("F.cross_entropy(model(xb), yb)", 'F.cross_entropy(model(xb), yb, reduction="sum")'),
    "statistics of each rank": ("x = x * 2.0", "x = (x - x.mean(0)) / x.std(0)"),
    "a mean of means": (
        "shown[0] / shown[1]",
        "of_class / (yb == 0).sum(); dist.all_reduce(shown); shown = shown / world",
    ),
    "a rate by the rank's own loss": ("schedule.step()", "optimizer.param_groups[0]['lr'] = 1e-2 * loss.item()"),
    "noise alike on all ranks": ("torch.manual_seed(7 + rank)", "torch.manual_seed(7)"),
    "other masks in the second forward": ("use_reentrant=False", "use_reentrant=False, preserve_rng_state=False"),
    "a buffer of the rank's own batch": ("dist.all_reduce(mean)", "mean = mean * world"),
    "a parameter that is not averaged": (
        "loss.backward()",
        "loss.backward(); net.last.bias.grad.add_(loss.detach() * (1 + rank))",
    ),
    "an average of each rank's batch": (
        "ours.lerp_(theirs, 0.1)",
        "ours.lerp_(theirs * (1 + xb.mean()), 0.1)",
    ),
    "steps that 16 bits round away": ("lr=1e-2 * world", "lr=1e-6"),
}

RULES = {
    "a sum in place of a mean": "ranks.gradient",
    "statistics of each rank": "ranks.gradient",
    "a mean of means": "ranks.printed",
    "a rate by the rank's own loss": "ranks.rate",
    "noise alike on all ranks": "ranks.draws",
    "other masks in the second forward": "recompute.gradient",
    "a buffer of the rank's own batch": "ranks.state",
    "a parameter that is not averaged": "ranks.own-gradient",
    "an average of each rank's batch": "ranks.state",
    "steps that 16 bits round away": "precision.rounded-away",
}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptHost, Path]]:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text("")
    with ScriptHost([str(path)]) as running:
        yield running, path


def found_in(host: tuple[ScriptHost, Path], text: str) -> Findings:
    running, path = host
    path.write_text(text)
    findings = Findings()
    judge_script(running, [str(path)], 2, findings, updates=8)
    return findings


def test_a_correct_script_is_silent(host: tuple[ScriptHost, Path]) -> None:
    """Dropout, noise, buffers, averages, a scaled rate, rank 0's own loss, seconds and a date."""
    findings = found_in(host, CORRECT)
    assert findings == []
    assert findings.unchecked == []


@pytest.mark.integration
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_relation_is_named(host: tuple[ScriptHost, Path], name: str) -> None:
    """By the relation alone, at the line or at the update that it changes."""
    right, wrong = BROKEN[name]
    assert right in CORRECT
    text = CORRECT.replace(right, wrong)
    if name.startswith("steps"):
        text = text.replace("net = Net()", "net = Net().bfloat16()").replace("model(xb)", "model(xb.bfloat16())")
        text = text.replace("model.module(xb)", "model.module(xb.bfloat16())")
    findings = found_in(host, text)
    assert RULES[name] in [finding.rule for finding in findings], (findings, findings.unchecked)


def test_a_rule_that_explains_a_difference_gets_it_as_a_consequence() -> None:
    """One mistake is one finding; an unexplained difference is one of its own."""
    rule = Finding("FAIL", "gradient.scale", "train.py:7", "2 times too large")
    difference = Finding("WARN", "ranks.gradient", "train.py:9", "update 0 differs")
    (joined,) = joined_findings([rule], [difference])
    assert joined.rule == "gradient.scale"
    assert joined.also == ("train.py:9",)
    assert "update 0 differs" in joined.text
    note = Finding("NOTE", "data.padded", "train.py:3", "one sample twice")
    assert [finding.rule for finding in joined_findings([note], [difference])] == ["ranks.gradient", "data.padded"]


def test_a_rule_is_the_cause_only_of_its_kind_of_difference() -> None:
    """A late evaluation rule does not swallow a gradient; a vague rule gives way to the line of a difference."""
    evaluation = Finding("FAIL", "eval.shard", "train.py:30", "rank 0's shard only")
    difference = Finding("WARN", "ranks.gradient", "train.py:9", "it begins here")
    assert [each.rule for each in joined_findings([evaluation], [difference])] == ["eval.shard", "ranks.gradient"]
    vague = Finding("WARN", "gradient.unexplained", "train.py:47", "changed in between")
    (joined,) = joined_findings([vague], [difference])
    assert (joined.rule, joined.place, joined.also) == ("ranks.gradient", "train.py:9", ("train.py:47",))
    assert "changed in between" in joined.text
