"""A training script on two ranks is compared with one rank: correct scripts, and the same scripts with mistakes.

No rule of audit runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import everyrank.relations.compare as compare_module
from everyrank.audit import Finding
from everyrank.audit.finding import Findings
from everyrank.relations import joined_findings, judge_script
from everyrank.relations.schedule import is_scaled_by_ranks
from everyrank.rerun import ScriptHost

CORRECT = """
import copy, datetime, os, time
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
print(f"process {os.getpid()} of {world}, {len(data) // world} samples of each")
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
            print(f"{now} {world} ranks, loss of class 0 {shown.item():.6f}, mine {loss.item():.6f}, {seconds:.4f} s")
        print(f"rank {rank}: loss {loss.item() * 3:.6f}")
dist.destroy_process_group()
"""

BROKEN = {
    "a sum in place of a mean": ("F.cross_entropy(model(xb), yb)", 'F.cross_entropy(model(xb), yb, reduction="sum")'),
    "statistics of each rank": ("x = x * 2.0", "x = (x - x.mean(0)) / x.std(0)"),
    "a scale of each rank's batch": (
        "xb = xb + 0.1 * torch.randn_like(xb)",
        "xb = xb / xb.abs().max() + 0.1 * torch.randn_like(xb)",
    ),
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
    "a scale of each rank's batch": "ranks.input",
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
    """Yield a running script host and the path of the script that it runs."""
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text("")
    with ScriptHost([str(path)]) as script_host:
        yield script_host, path


def find_differences(host: tuple[ScriptHost, Path], script: str, updates: int = 8) -> Findings:
    """Return the findings of a comparison of this script with one rank."""
    return compare_with_one_rank(host, script, updates)[0]


def compare_with_one_rank(host: tuple[ScriptHost, Path], script: str, updates: int = 8) -> tuple[Findings, int]:
    """Return the findings, and the number of updates in which two ranks compute the same as one rank."""
    script_host, path = host
    path.write_text(script)
    findings = Findings()
    return findings, judge_script(script_host, [str(path)], 2, findings, updates)


def test_correct_script_has_no_findings(host: tuple[ScriptHost, Path]) -> None:
    """It has dropout, noise, buffers, averaged weights, a scaled learning rate, rank 0's own loss, times and a date."""
    findings, num_equal = compare_with_one_rank(host, CORRECT)
    assert findings == []
    assert findings.unchecked == []
    assert num_equal == 8


ON_CUDA = {
    'dist.init_process_group("gloo")': "import os\n"
    'device = torch.device("cuda:" + os.environ["LOCAL_RANK"] if torch.cuda.is_available() else "cpu")\n'
    'dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", device_id=device)',
    "DistributedDataParallel(net, ": "DistributedDataParallel(net.to(device), device_ids=[device.index], ",
    "xb = xb + 0.1 * torch.randn_like(xb)": "xb, yb = xb.to(device), yb.cuda(non_blocking=True)\n"
    "        xb = xb + 0.1 * torch.randn_like(xb)",
    "dist.all_reduce(mean)": "dist.all_reduce(mean, op=dist.ReduceOp.AVG)",
    "mean / world": "mean",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is for hosts without a GPU")
def test_correct_gpu_script_is_compared_on_the_cpu(host: tuple[ScriptHost, Path]) -> None:
    """It uses NCCL, one GPU per rank, and the reduction AVG, which gloo does not have."""
    script = CORRECT
    for cpu_code, cuda_code in ON_CUDA.items():
        assert cpu_code in script
        script = script.replace(cpu_code, cuda_code)
    findings = find_differences(host, script)
    assert findings == []
    assert findings.unchecked == []


@pytest.mark.integration
@pytest.mark.parametrize("name", BROKEN)
def test_mistake_is_reported(host: tuple[ScriptHost, Path], name: str) -> None:
    """Only the comparison with one rank runs. It reports the mistake with the expected rule."""
    correct_code, wrong_code = BROKEN[name]
    assert correct_code in CORRECT
    script = CORRECT.replace(correct_code, wrong_code)
    if name.startswith("steps"):
        script = script.replace("net = Net()", "net = Net().bfloat16()").replace("model(xb)", "model(xb.bfloat16())")
        script = script.replace("model.module(xb)", "model.module(xb.bfloat16())")
    findings, num_equal = compare_with_one_rank(host, script)
    assert num_equal < 8 or RULES[name] not in ("ranks.gradient", "ranks.rate")
    assert RULES[name] in [finding.rule for finding in findings], (findings, findings.unchecked)


def test_factor_that_each_rank_draws_is_not_reported(host: tuple[ScriptHost, Path]) -> None:
    """Rank 0 and a single rank draw the same factors, as for mixup, from a generator of numpy."""
    script = CORRECT.replace("rank, world = ", "import numpy\nrank, world = ").replace(
        "        xb = xb + ", "        xb = xb * float(factors.uniform(0.1, 1.0))\n        xb = xb + "
    )
    script = script.replace("sampler = ", "factors = numpy.random.default_rng(5 + rank)\nsampler = ")
    assert find_differences(host, script) == []


RANK_DEPENDENT_NUMBERS = """
import random
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(160, 6)
data = TensorDataset(x, x[:, :3].argmax(1))
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
random.seed(10 + rank)
torch.manual_seed(10 + rank)
seen = 0
for xb, yb in DataLoader(data, batch_size=10, sampler=DistributedSampler(data)):
    loss = F.cross_entropy(net(xb), yb)
    optimizer.zero_grad()
    loss.backward()
    for p in net.parameters():
        sent = p.grad
        dist.all_reduce(sent)
        p.grad = (sent / world).to(p.dtype)
    optimizer.step()
    seen += world * len(xb)
    worst = loss.detach().clone()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"{seen / 1000:.6f} thousand samples, batch of {10 * world}, worst loss {worst.item():.6f}")
"""
"""A script whose ranks differ from one rank on purpose.

It prints a count of samples and the largest loss of all ranks.
"""

NOT_COMPARED = {
    "rounded gradients": ("sent = p.grad", "sent = p.grad.bfloat16().to(p.dtype)", "they differ|they are rounded"),
    "the largest tenth": (
        "sent = p.grad",
        "sent = p.grad * (p.grad.abs() >= p.grad.abs().flatten().topk(-(-p.grad.numel() // 10)).values[-1])",
        "only some elements are sent",
    ),
    "a weight of each batch": ("net(xb)", "net(xb * random.uniform(0.5, 1.5))", "different random numbers"),
    "noise in the gradient": (
        "sent = p.grad",
        "sent = p.grad + torch.zeros_like(p.grad).normal_()",
        "different random",
    ),
}


def test_numbers_that_depend_on_ranks_on_purpose_have_no_findings(host: tuple[ScriptHost, Path]) -> None:
    """The printed sample counts and the largest loss depend on the number of ranks."""
    findings, num_equal = compare_with_one_rank(host, RANK_DEPENDENT_NUMBERS)
    assert findings == []
    assert num_equal == 8


@pytest.mark.integration
@pytest.mark.parametrize("name", NOT_COMPARED)
def test_updates_that_depend_on_ranks_on_purpose_are_not_compared(host: tuple[ScriptHost, Path], name: str) -> None:
    """Gradients are compressed, or random numbers are drawn for a whole batch or for a gradient."""
    original_code, changed_code, reason = NOT_COMPARED[name]
    assert original_code in RANK_DEPENDENT_NUMBERS
    findings = find_differences(host, RANK_DEPENDENT_NUMBERS.replace(original_code, changed_code, 1))
    assert findings == []
    assert any(re.search(reason, unchecked_line) for unchecked_line in findings.unchecked), findings.unchecked


WORKERS_AND_SCHEDULE = """
import copy
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Drawn(Dataset):
    epoch = 0

    def __len__(self):
        return 96

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(1000 * self.epoch + index)
        x = torch.randn(6, generator=generator)
        return x, x[:3].argmax()


net = nn.Linear(6, 3)
averaged = copy.deepcopy(net)
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data, held = Drawn(), torch.randn(50, 6)
loader = DataLoader(data, 8, sampler=DistributedSampler(data), num_workers=1)
evaluation = DataLoader(TensorDataset(held, held[:, :3].argmax(1)), 25, sampler=DistributedSampler(held))
updates = 3 * 96 // 16 // world
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / updates))
for epoch in range(3):
    data.epoch = epoch
    for step, (x, y) in enumerate(loader):
        (F.cross_entropy(model(x), y) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            with torch.no_grad():
                averaged.weight.lerp_(net.weight, 0.1)
    total = torch.zeros(2)
    with torch.no_grad():
        for x, y in evaluation:
            total += torch.tensor([(net(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(total)
    if rank == 0:
        print(f"accuracy {total[0] / total[1]:.4f}")
"""

WORKERS_AND_SCHEDULE_MISTAKES = {
    "average.often": (
        "            with torch.no_grad():\n                averaged",
        "        if True:\n            with torch.no_grad():\n                averaged",
    ),
    "data.frozen-workers": ("num_workers=1", "num_workers=1, persistent_workers=True"),
    "schedule.horizon": (" // world", ""),
    "ranks.printed": ("    dist.all_reduce(total)\n", ""),
}


def test_correct_workers_evaluation_averages_and_schedule_have_no_findings(host: tuple[ScriptHost, Path]) -> None:
    """The dataset depends on the epoch, and the schedule depends on the number of ranks.

    The script also accumulates gradients and averages weights.
    """
    assert find_differences(host, WORKERS_AND_SCHEDULE, 48) == []


@pytest.mark.integration
@pytest.mark.parametrize("rule", WORKERS_AND_SCHEDULE_MISTAKES)
def test_mistake_in_workers_evaluation_averages_or_schedule_is_reported(
    host: tuple[ScriptHost, Path], rule: str
) -> None:
    """Workers keep the first epoch, or only rank 0's evaluation is printed.

    Other mistakes are an average per micro-batch, and a schedule that ignores the number of ranks.
    """
    correct_code, wrong_code = WORKERS_AND_SCHEDULE_MISTAKES[rule]
    assert correct_code in WORKERS_AND_SCHEDULE
    assert [
        finding.rule for finding in find_differences(host, WORKERS_AND_SCHEDULE.replace(correct_code, wrong_code), 48)
    ] == [rule]


LONG_EPOCHS = (
    WORKERS_AND_SCHEDULE.replace("return 96", "return 4096")
    .replace("range(3)", "range(30)")
    .replace("held[:, :3]", "held[:, 1:4]")
)
"""An epoch is longer than the number of updates of a test."""


@pytest.mark.integration
def test_correct_evaluation_after_long_epoch_has_no_findings(
    host: tuple[ScriptHost, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second comparison with shorter epochs reaches the evaluation. It does not reach the end of the schedule."""
    monkeypatch.setattr(compare_module, "_COMPLETE_RUN_SECONDS", 1.0)
    findings = find_differences(host, LONG_EPOCHS)
    assert findings == []
    assert [reason.partition(":")[0] for reason in findings.unchecked] == [
        "whether the schedule ends with the training"
    ]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("correct_code", "wrong_code"),
    [
        ("    dist.all_reduce(total)\n", ""),
        (
            "    dist.all_reduce(total)\n",
            "    total[0] *= 1 + total[0] / 500\n    dist.all_reduce(total)\n",
        ),
    ],
)
def test_mistake_in_evaluation_after_long_epoch_is_reported(
    host: tuple[ScriptHost, Path], monkeypatch: pytest.MonkeyPatch, correct_code: str, wrong_code: str
) -> None:
    """One mistake prints rank 0's own number. The other prints a number that is not a sum over samples."""
    monkeypatch.setattr(compare_module, "_COMPLETE_RUN_SECONDS", 1.0)
    assert correct_code in LONG_EPOCHS
    assert [finding.rule for finding in find_differences(host, LONG_EPOCHS.replace(correct_code, wrong_code))] == [
        "ranks.printed"
    ]


BATCH_FUNCTION = """
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.norm(checkpoint(self.first, x, use_reentrant=False)))


def samples(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(int(torch.randint(8, 20, (1,), generator=generator)), 6, generator=generator)
    return x, x[:, :3].argmax(1)


@torch.no_grad()
def score(layer):  # of five parts, three of which rank 0 has
    sums = torch.zeros(2)
    for part in range(rank, 5, world):
        x, _ = samples(50, part)
        sums += torch.stack([layer(x).square().sum(), torch.tensor(float(len(x)))])
    dist.all_reduce(sums)
    return sums[0] / sums[1]


model = nn.parallel.DistributedDataParallel(Net(), broadcast_buffers=False)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(5):
    x, y = samples(step, rank)
    total = torch.tensor(len(y))
    dist.all_reduce(total)
    loss = F.cross_entropy(model(x), y, reduction="sum")
    optimizer.zero_grad()
    (loss * world / total).backward()
    optimizer.step()
    shown = loss.detach() / len(y)
    shown = loss.detach().clone()
    dist.all_reduce(shown)
    reached = score(model.module.first)
    if rank == 0:
        print(f"loss {shown / total:.6f}")
        print(f"score {reached:.6f}")
"""

BATCH_FUNCTION_MISTAKES = {
    "ranks.gradient": ("loss * world", "loss"),
    "ranks.printed": ("shown = loss.detach().clone()", "shown = shown.clone() * total / world"),
    "recompute.state": (
        "self.last(self.norm(checkpoint(self.first, x, use_reentrant=False)))",
        "self.last(checkpoint(lambda x: self.norm(self.first(x)), x, use_reentrant=False))",
    ),
    "optimizer.counted": (
        "for step in",
        "for p in model.parameters():\n    p.grad = torch.zeros_like(p)\noptimizer.step()\nfor step in",
    ),
}


def test_batches_from_a_function_are_merged(host: tuple[ScriptHost, Path]) -> None:
    """The function seeds by step and rank. Each rank has a different number of samples."""
    findings = find_differences(host, BATCH_FUNCTION)
    assert findings == []
    assert findings.unchecked == []


BATCH_GENERATOR = """
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


def samples(rank):
    generator = torch.Generator().manual_seed(rank)
    while True:
        x = torch.randn(8, 6, generator=generator)
        yield x, x[:, :3].argmax(1)


model = nn.parallel.DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step, (x, y) in zip(range(5), samples(rank)):
    loss = F.cross_entropy(model(x), y, reduction="sum")
    optimizer.zero_grad()
    (loss / len(y)).backward()
    optimizer.step()
"""


def test_batches_from_a_generator_are_merged(host: tuple[ScriptHost, Path]) -> None:
    """A summed loss, whose gradient is averaged over the ranks, is reported."""
    assert compare_with_one_rank(host, BATCH_GENERATOR) == ([], 5)
    assert [finding.rule for finding in find_differences(host, BATCH_GENERATOR.replace("(loss / len(y))", "loss"))] == [
        "ranks.gradient"
    ]


@pytest.mark.integration
@pytest.mark.parametrize("rule", BATCH_FUNCTION_MISTAKES)
def test_mistake_in_script_without_loader_is_reported(host: tuple[ScriptHost, Path], rule: str) -> None:
    """The mistakes are a summed loss with averaged gradients and a mean of means.

    Other mistakes are batch norm statistics that are updated twice, and an extra optimizer step.
    """
    correct_code, wrong_code = BATCH_FUNCTION_MISTAKES[rule]
    assert correct_code in BATCH_FUNCTION
    assert [finding.rule for finding in find_differences(host, BATCH_FUNCTION.replace(correct_code, wrong_code))] == [
        rule
    ]


TWO_VIEWS = """
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.distributed.nn.functional import all_reduce

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("counts", torch.zeros(4))

    def forward(self, x):
        y = self.layer(x)
        self.counts += F.one_hot(y.detach().argmax(1), 4).sum(0)
        return y


def halved(state, bucket):
    small = bucket.buffer().to(torch.bfloat16)
    dist.all_reduce(small)
    done = torch.futures.Future()
    done.set_result(bucket.buffer().copy_(small).div_(world))
    return done


model = nn.parallel.DistributedDataParallel(Net(), broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(rank)
for step in range(5):
    x = torch.randn(8, 6, generator=generator)
    a, b = model(torch.cat([x, x + 0.1 * torch.randn(8, 6, generator=generator)])).chunk(2)
    loss = (all_reduce(a.t() @ b) / (len(a) * world) - torch.eye(4)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dist.all_reduce(model.module.counts)
    model.module.counts.zero_()
    if rank == 0:
        print({"loss": round(loss.item(), 3), "share": 0.12345})
"""


def test_two_views_and_local_counts_have_no_findings(host: tuple[ScriptHost, Path]) -> None:
    """One rank has the rows in a different order. Local counts are summed after the optimizer step."""
    assert compare_with_one_rank(host, TWO_VIEWS) == ([], 5)


@pytest.mark.integration
def test_communication_hook_is_not_compared_unless_it_scales_gradients(host: tuple[ScriptHost, Path]) -> None:
    """A hook that rounds to 16 bits is not compared. A hook that sums without dividing is reported."""
    script_with_hook = TWO_VIEWS.replace("optimizer = ", "model.register_comm_hook(None, halved)\noptimizer = ")
    findings = find_differences(host, script_with_hook)
    assert findings == []
    assert "communication hook" in findings.unchecked[0]
    findings_of_summing_hook = find_differences(host, script_with_hook.replace(".div_(world)", ""))
    assert [finding.rule for finding in findings_of_summing_hook] == ["ranks.gradient"]
    assert "they are 2" in findings_of_summing_hook[0].text


@pytest.mark.integration
def test_persistent_workers_that_keep_the_first_epoch_are_reported(host: tuple[ScriptHost, Path]) -> None:
    """Every epoch reads all samples in the order of the first epoch."""
    stream_script = WORKERS_AND_SCHEDULE.replace("num_workers=1", "num_workers=1, persistent_workers=True")
    stream_script = stream_script.replace("Dataset, Dist", "Dataset, IterableDataset, Dist")
    stream_script = stream_script.replace("sampler=DistributedSampler(data), ", "").replace(
        "class Drawn(Dataset)", "class Drawn(IterableDataset)"
    )
    stream_script = stream_script.replace("    def __getitem__(self, index):\n", SHUFFLED_ITER_METHOD)
    for script, rules in (
        (stream_script, ["data.frozen-workers"]),
        (stream_script.replace(", persistent_workers=True", ""), []),
    ):
        assert [finding.rule for finding in find_differences(host, script, 48)] == rules


SHUFFLED_ITER_METHOD = """    def __iter__(self):
        order = torch.randperm(96, generator=torch.Generator().manual_seed(self.epoch))
        yield from (self.sample(index) for index in order[rank::world].tolist())

    def sample(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=generator)
        return x, x[:3].argmax()

    def unused(self, index):
"""


INTERLEAVED = """
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def drop(self, x):
        return F.dropout(self.first(x), 0.3, self.training)

    def forward(self, x):
        return self.last(checkpoint(self.drop, x, use_reentrant=False))


model = nn.parallel.DistributedDataParallel(Net())
torch.manual_seed(10 + rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.integration
def test_dropout_masks_of_interleaved_rows_are_merged_in_rank_order(host: tuple[ScriptHost, Path]) -> None:
    """Each rank takes every second row of the batch. The rows of one rank are in a different order than the masks."""
    findings, num_equal = compare_with_one_rank(host, INTERLEAVED)
    assert (list(findings), num_equal) == ([], 6)
    (finding,) = find_differences(host, INTERLEAVED.replace("loss.backward()", "(loss * world).backward()"))
    assert finding.rule == "ranks.gradient"
    findings = find_differences(
        host, INTERLEAVED.replace("use_reentrant=False", "use_reentrant=False, preserve_rng_state=False")
    )
    assert "recompute.gradient" in [finding.rule for finding in findings]


TWO_HALVES = """
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F

BATCH = 12
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
generator = torch.Generator().manual_seed(50 + dist.get_rank())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    real, fake = torch.randn(BATCH, 4, generator=generator), torch.rand(BATCH, 4, generator=generator)
    scores = model(torch.cat([real, fake]))
    loss = F.softplus(-scores[:BATCH]).mean() + F.softplus(scores[BATCH:]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.integration
def test_batch_size_that_also_splits_the_output_is_scaled(host: tuple[ScriptHost, Path]) -> None:
    """One rank draws as many samples as both ranks together. The batch size in the script has to grow with them."""
    findings, num_equal = compare_with_one_rank(host, TWO_HALVES)
    assert (list(findings), num_equal) == ([], 6)
    (finding,) = find_differences(
        host, TWO_HALVES.replace("loss.backward()", "(loss * dist.get_world_size()).backward()")
    )
    assert finding.rule == "ranks.gradient"


ENSEMBLE = """
import torch, torch.distributed as dist, torch.distributed.nn, torch.nn as nn, torch.nn.functional as F

BATCH = 16
dist.init_process_group("gloo")
torch.manual_seed(0)
data = torch.randn(256, 6)
model = nn.parallel.DistributedDataParallel(nn.Linear(9, 3))
noise = torch.Generator().manual_seed(50 + dist.get_rank())
picker = torch.Generator().manual_seed(1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    x = data[torch.randint(0, 256, (BATCH,), generator=picker)]
    members = model(torch.cat([x.repeat(2, 1, 1), torch.randn(2, BATCH, 3, generator=noise)], -1))
    every_member = torch.cat(torch.distributed.nn.all_gather(members))
    loss = (every_member - x[:, :3]).abs().mean() - every_member.std(0).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.integration
def test_ensemble_members_on_the_same_samples_are_not_compared(host: tuple[ScriptHost, Path]) -> None:
    """Each rank adds its own noise to the same batch. A batch that is twice as long is not equivalent."""
    findings = find_differences(host, ENSEMBLE)
    assert findings == []
    [reason] = findings.unchecked
    assert "does not run on one rank with the batches of all" in reason


SHARDED = """
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(64, 6)
data = TensorDataset(x, x[:, :3].argmax(1))
model, teacher = nn.Linear(6, 3), nn.Linear(6, 15)
fully_shard(model)
fully_shard(teacher)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for xb, yb in DataLoader(data, batch_size=8, sampler=DistributedSampler(data)):
    F.cross_entropy(model(xb), yb).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        mean = xb.mean()
        dist.all_reduce(mean)
        teacher.weight.to_local().add_(0.1 * mean / dist.get_world_size())
"""


@pytest.mark.integration
def test_shards_of_a_state_are_joined_before_comparison(host: tuple[ScriptHost, Path]) -> None:
    """The teacher has 15 rows and no optimizer. Its shards on two ranks have 8 and 7 rows."""
    findings = find_differences(host, SHARDED)
    assert findings == []
    assert findings.unchecked == []
    (finding,) = find_differences(host, SHARDED.replace("        dist.all_reduce(mean)\n", ""))
    assert (finding.rule, finding.level) == ("ranks.state", "WARN")
    assert re.search(r"the state .*weight", finding.text)


@pytest.mark.parametrize(("two_ranks", "expected"), [([1.0, 0.5, 0.0], True), ([1.0, 0.9, 0.2], False), ([1.0], None)])
def test_schedule_that_is_divided_by_the_number_of_ranks_is_correct(
    two_ranks: list[float], expected: bool | None
) -> None:
    """Two ranks have the learning rates that one rank has after twice as many updates."""
    one_rank = [1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0]
    assert is_scaled_by_ranks(two_ranks, one_rank[: 2 * len(two_ranks) + 1], 2) is expected


def test_difference_is_joined_to_the_rule_that_explains_it() -> None:
    """One mistake gives one finding. A difference that no rule explains is a separate finding."""
    rule_finding = Finding("FAIL", "gradient.scale", "train.py:7", "2 times too large")
    difference = Finding("WARN", "ranks.gradient", "train.py:9", "update 0 differs")
    (joined_finding,) = joined_findings([rule_finding], [difference])
    assert joined_finding.rule == "gradient.scale"
    assert joined_finding.other_lines == ("train.py:9",)
    assert "update 0 differs" in joined_finding.text
    note_finding = Finding("NOTE", "data.padded", "train.py:3", "one sample twice")
    assert [finding.rule for finding in joined_findings([note_finding], [difference])] == [
        "ranks.gradient",
        "data.padded",
    ]


def test_rule_explains_only_its_kind_of_difference() -> None:
    """A rule about evaluation does not explain a gradient. A vague rule is joined to the line of the difference."""
    evaluation_finding = Finding("FAIL", "eval.shard", "train.py:30", "rank 0's shard only")
    difference = Finding("WARN", "ranks.gradient", "train.py:9", "it begins here")
    assert [finding.rule for finding in joined_findings([evaluation_finding], [difference])] == [
        "eval.shard",
        "ranks.gradient",
    ]
    vague_finding = Finding("WARN", "gradient.unexplained", "train.py:47", "changed in between")
    (joined_finding,) = joined_findings([vague_finding], [difference])
    assert (joined_finding.rule, joined_finding.location, joined_finding.other_lines) == (
        "ranks.gradient",
        "train.py:9",
        ("train.py:47",),
    )
    assert "changed in between" in joined_finding.text


@pytest.mark.parametrize(
    ("rule", "location", "other_lines"),
    [
        ("gradient.unexplained", "", ()),  # for example an optimizer step in a library
        ("gradient.unexplained", "train.py:5", ()),
        ("gradient.scale", "", ()),
        ("gradient.scale", "train.py:9", ("train.py:9",)),
    ],
)
def test_joined_finding_keeps_its_line(rule: str, location: str, other_lines: tuple[str, ...]) -> None:
    """A difference whose line is unknown does not replace a known line, and adds no empty one."""
    rule_finding = Finding("WARN", rule, "train.py:5", "changed in between")
    (joined_finding,) = joined_findings([rule_finding], [Finding("WARN", "ranks.gradient", location, "it differs")])
    assert (joined_finding.rule, joined_finding.location) == (rule, "train.py:5")
    assert joined_finding.other_lines == other_lines
    assert "it differs" in joined_finding.text


ONE_TASK_PER_RANK = """
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(80, 6)
data = TensorDataset(x, x[:, :3].argmax(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.heads = nn.ModuleDict({name: nn.Linear(8, 3) for name in ("first", "second")})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x).tanh())


model = nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for xb, yb in DataLoader(data, batch_size=10, sampler=DistributedSampler(data, shuffle=False)):
    loss = F.cross_entropy(model(xb, ("first", "second")[rank]), yb)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_ranks_with_different_tasks_are_not_compared(host: tuple[ScriptHost, Path]) -> None:
    """One rank would train a single task on all samples."""
    findings = find_differences(host, ONE_TASK_PER_RANK)
    assert findings == []
    assert any("calls the model with a different text" in reason for reason in findings.unchecked)
