"""Comparison of running statistics, counters and skipped batches in a script's own objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from everyrank.audit.finding import Findings
from everyrank.relations import judge_script
from everyrank.rerun import ScriptHost

CORRECT = """
import copy, os, tempfile
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Scaled:
    def __init__(self, size):
        self.mean, self.variance, self.seen = torch.zeros(size), torch.ones(size), 0

    def add(self, x):
        sums = torch.stack([x.sum(0), (x * x).sum(0), torch.full_like(x[0], len(x))])
        dist.all_reduce(sums)
        mean, square = sums[0] / sums[2], sums[1] / sums[2]
        self.mean = 0.9 * self.mean + 0.1 * mean
        self.variance = 0.9 * self.variance + 0.1 * (square - mean**2)

    def __call__(self, x):
        return (x - self.mean) / (self.variance + 1e-3).sqrt()


class Average:
    def __init__(self, net):
        self.net, self.updates, self.shown = copy.deepcopy(net), 0, 0

    def update(self, net):
        self.updates += 1
        self.shown += 1
        with torch.no_grad():
            for ours, theirs in zip(self.net.parameters(), net.parameters()):
                ours.lerp_(theirs, 1 / (1 + self.updates))

    def state_dict(self):
        return {"net": self.net.state_dict(), "updates": self.updates}

    def load_state_dict(self, state):
        self.net.load_state_dict(state["net"])
        self.updates = state["updates"]


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(160, 6)
data = TensorDataset(x, x[:, :3].argmax(1))
net, scaled = nn.Linear(6, 3), Scaled(6)
average, model = Average(net), nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for step, (xb, yb) in enumerate(loader):
        if step < 2 and epoch == 0:
            continue
        scaled.add(xb)
        loss = F.cross_entropy(model(scaled(xb)), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(net)
    if rank == 0:
        torch.save({"net": net.state_dict(), "average": average.state_dict()}, "last.pt")
"""

BROKEN = {
    "ranks.state": ("        dist.all_reduce(sums)\n", ""),
    "save.counter": (', "updates": self.updates}', "}"),
    "data.untrained": (" and epoch == 0", ""),
}
EXPECTED_LINES = {
    "ranks.state": "self.mean = 0.9",
    "save.counter": "return {",
    "data.untrained": "in enumerate(loader)",
}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptHost, Path]]:
    """Yield a running script host and the folder for scripts."""
    path = tmp_path_factory.mktemp("objects") / "train.py"
    path.write_text("")
    with ScriptHost([str(path)]) as script_host:
        yield script_host, path.parent


def find_mistakes(host: tuple[ScriptHost, Path], script: str) -> Findings:
    """Return the findings of a comparison of this script on two ranks with one rank."""
    script_host, folder = host
    path = folder / f"train{len(list(folder.iterdir()))}.py"  # a new path: each source file is read only once
    path.write_text(script)
    findings = Findings()
    judge_script(script_host, [str(path)], 2, findings, updates=12)
    return findings


def test_custom_objects_of_correct_script_have_no_findings(host: tuple[ScriptHost, Path]) -> None:
    """The script all-reduces its statistics and saves one counter. Another counter has no effect on training.

    It also skips two batches in the first epoch only.
    """
    findings = find_mistakes(host, CORRECT)
    assert findings == []
    assert findings.unchecked == []


@pytest.mark.integration
@pytest.mark.parametrize("rule", BROKEN)
def test_mistake_in_custom_object_is_reported(host: tuple[ScriptHost, Path], rule: str) -> None:
    """The mistakes are local statistics, a counter missing from the checkpoint, and batches skipped in every epoch."""
    correct_code, wrong_code = BROKEN[rule]
    assert correct_code in CORRECT
    script = CORRECT.replace(correct_code, wrong_code)
    if rule == "ranks.state":  # without it the gradient would differ first
        script = script.replace("model(scaled(xb))", "model(xb)")
    findings = find_mistakes(host, script)
    assert [finding.rule for finding in findings] == [rule], findings
    line_number = int(findings[0].location.rpartition(":")[2])
    assert EXPECTED_LINES[rule] in script.splitlines()[line_number - 1]
