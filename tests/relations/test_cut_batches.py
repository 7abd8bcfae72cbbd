"""Scripts that cut their own batches, or whose ranks hold parts of a model, are compared with one rank."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from everyrank.audit.finding import Findings
from everyrank.relations import compare, judge_script
from everyrank.relations.compare import _run_with_cut_batches
from everyrank.relations.ranks import num_with_same_inputs
from everyrank.rerun import ScriptHost
from everyrank.rerun.recording import SHAPES_DIFFER

SETUP = """
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 6)
y = x[:, :3].argmax(1)


def train(x, y):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"loss {loss.item():.6f}")

"""

SLICED_ROWS = """
BATCH = 4
noise = torch.Generator().manual_seed(100 + rank)
for epoch in range(2):
    shuffle = torch.Generator().manual_seed(epoch)
    order = torch.randperm(len(x), generator=shuffle)[rank::world]
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        train(x[rows] + 0.1 * torch.randn(BATCH, 6, generator=noise), y[rows])
"""

LIST_OF_BATCHES = """
import random

batches = [(x[start : start + 4], y[start : start + 4]) for start in range(0, len(x), 4)]
for epoch in range(2):
    random.Random(epoch).shuffle(batches)
    for xb, yb in batches[rank::world]:
        train(xb, yb)
"""

PROMPTS = """
prompts, answers = 2, 3
generator = torch.Generator().manual_seed(7 + rank)
for step in range(5):
    asked = torch.randn(prompts, 6, generator=generator).repeat_interleave(answers, 0)
    xb = asked + 0.1 * torch.randn(prompts * answers, 6, generator=generator)
    scores = xb.sum(1).view(prompts, answers)
    train(xb, (scores > scores.mean(1, keepdim=True)).long().flatten())
"""

FEW_INTEGERS = """
generator = torch.Generator().manual_seed(rank)
for step in range(5):
    start = torch.randint(0, 50, (4, 1), generator=generator)
    stride = torch.randint(1, 3, (4, 1), generator=generator)
    xb = (start + stride * torch.arange(6)) / 50.0
    train(xb, stride[:, 0])
"""

SCRIPTS = {"rows": SLICED_ROWS, "listed": LIST_OF_BATCHES, "prompts": PROMPTS, "few integers": FEW_INTEGERS}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptHost, Path]]:
    """Yield a running script host and the path of the script that it runs."""
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text("")
    with ScriptHost([str(path)], timeout_seconds=60.0) as script_host:
        yield script_host, path


def compare_with_one_rank(host: tuple[ScriptHost, Path], script: str) -> tuple[Findings, int]:
    """Return the findings, and the number of updates in which two ranks compute the same as one rank."""
    script_host, path = host
    path.write_text(script)
    findings = Findings()
    return findings, judge_script(script_host, [str(path)], 2, findings, updates=8)


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_that_cuts_its_own_batches_is_compared_with_one_rank(host: tuple[ScriptHost, Path], name: str) -> None:
    """The correct script has no finding. A summed loss, whose gradient is averaged, is reported."""
    script = SETUP + SCRIPTS[name]
    findings, num_equal = compare_with_one_rank(host, script)
    assert findings == []
    assert all(reason.startswith("printed numbers") for reason in findings.unchecked), findings.unchecked
    assert num_equal > 4
    script_with_summed_loss = script.replace(
        "F.cross_entropy(model(x), y)", 'F.cross_entropy(model(x), y, reduction="sum")'
    )
    assert [finding.rule for finding in compare_with_one_rank(host, script_with_summed_loss)[0]] == ["ranks.gradient"]


def test_ranks_with_different_shuffle_orders_share_samples(host: tuple[ScriptHost, Path]) -> None:
    """A different shuffle order on each rank makes the ranks read the same samples."""
    findings, _ = compare_with_one_rank(
        host, SETUP + SLICED_ROWS.replace("manual_seed(epoch)", "manual_seed(epoch + rank)")
    )
    assert [finding.rule for finding in findings] == ["data.shared-samples"]


@pytest.mark.parametrize(
    ("ranks", "single_rank", "expected"),
    [
        ([{0: [1.0], 1: [2.0]}, {0: [3.0], 1: [5.0]}], {0: [4.0], 1: [7.0]}, 9),
        ([{0: [1.0], 1: [2.0]}, {0: [3.0], 1: [5.0]}], {0: [4.0], 1: [6.0]}, 1),
        ([{0: [1.0]}, {0: [1.0]}], {0: [1.0]}, 9),
        ([{0: [1.0, 1.0]}, {0: [1.0]}], {0: [1.0]}, 0),
    ],
    ids=["all samples", "others in update 1", "the same on all ranks", "more calls"],
)
def test_model_inputs_are_compared_in_every_update(
    ranks: list[dict[int, list[float]]], single_rank: dict[int, list[float]], expected: int
) -> None:
    """The sums of the model's inputs on all ranks are compared with those of one rank, update by update."""

    def recording(input_sums: list[dict[int, list[float]]]) -> Any:
        return SimpleNamespace(
            ranks=[SimpleNamespace(facts={"input_sums": sums_of_rank}, updates=[0] * 9) for sums_of_rank in input_sums]
        )

    assert num_with_same_inputs(recording(ranks), recording([single_rank])) == expected


def test_script_with_a_byte_order_mark_is_run_with_larger_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some editors of Windows write one. The names of its integers are tried as batch sizes."""
    script, sizes = tmp_path / "train.py", list[str]()
    script.write_bytes(codecs.BOM_UTF8 + b"prompts = 3")
    monkeypatch.setattr(compare, "num_comparable", lambda *_: (0, False))
    monkeypatch.setattr(compare, "judge_ranks", lambda *_: 0)
    rank = SimpleNamespace(facts={}, inputs=[[torch.zeros(6, 2)]], updates=[], printed=[])
    recording: Any = SimpleNamespace(ranks=[rank], failure="")

    def run_alone(imposed: Any) -> Any:
        sizes.append(imposed.larger)
        return recording

    compare._judge_against_one(recording, recording, script, run_alone, Findings())
    assert "prompts" in sizes


def test_loader_batches_of_different_shapes_are_not_rerun_with_larger_batches() -> None:
    """Each batch is padded to its longest text. Larger batch sizes in the script cannot make the shapes fit."""

    def run_alone(_: Any) -> Any:
        pytest.fail("the script is run again")

    def recording(**facts: Any) -> Any:
        return SimpleNamespace(ranks=[SimpleNamespace(facts=facts, inputs=[], updates=[])], failure="")

    single_rank_recording = recording(refused=[[SHAPES_DIFFER, 0]])
    assert (
        _run_with_cut_batches(recording(), single_rank_recording, b"BATCH = 8", run_alone)[0] is single_rank_recording
    )


def test_tensor_of_sums_and_counts_is_not_merged_like_a_batch(host: tuple[ScriptHost, Path]) -> None:
    """A tensor of per-rank metrics keeps its shape on one rank."""
    weighted_loss = (
        "metric = torch.tensor([float(rank), 1.0])\n    loss = F.cross_entropy(model(x), y) * metric[1:].view(())"
    )
    script = (SETUP + LIST_OF_BATCHES).replace("loss = F.cross_entropy(model(x), y)", weighted_loss)
    findings, num_equal = compare_with_one_rank(host, script)
    assert (findings, num_equal) == ([], 8)


TENSOR_PARALLEL = """
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(distribute_tensor(torch.ones(16), mesh, [Replicate()]))
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        hidden = self.up(x).relu()
        scale = self.scale.to_local(grad_placements=[Partial()]).chunk(mesh.size())[mesh.get_local_rank()]
        return self.down(hidden * scale)


model = parallelize_module(Net(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
for step in range(4):
    x = torch.randn(8, 6)
    loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_tensor_parallel_ranks_are_compared_with_one_rank(host: tuple[ScriptHost, Path]) -> None:
    """Weights are split by columns and by rows. A partial gradient that is not summed over the ranks is reported."""
    findings, num_equal = compare_with_one_rank(host, TENSOR_PARALLEL)
    assert (findings, findings.unchecked, num_equal) == ([], [], 4)
    findings, _ = compare_with_one_rank(host, TENSOR_PARALLEL.replace("grad_placements=[Partial()]", ""))
    assert [finding.rule for finding in findings] == ["ranks.own-gradient"]


def test_point_to_point_message_fails_at_once_on_one_rank(host: tuple[ScriptHost, Path]) -> None:
    """One rank cannot send to rank 1. With gloo it would wait for that rank."""
    send_or_receive = "dist.send(x[:4], 1) if rank == 0 else dist.recv(x[:4], 0)\n"
    findings, _ = compare_with_one_rank(host, SETUP + send_or_receive + SLICED_ROWS)
    assert findings == []
    assert any("a message to or from rank 1" in reason for reason in findings.unchecked), findings.unchecked


EVALUATION_ON_RANK_0 = """
noise = torch.Generator().manual_seed(100 + rank)
data = TensorDataset(x, y)
for epoch in range(3):
    for xb, yb in DataLoader(data, batch_size=16, sampler=DistributedSampler(data)):
        train(*noised(xb, yb, noise))
    if rank == 0:
        with torch.no_grad():
            held_out = noised(x, y, torch.Generator().manual_seed(0))
            print(f"held out {F.cross_entropy(model.module(held_out[0]), y).item():.6f}")
"""


def test_evaluation_on_rank_0_only_does_not_shift_random_numbers_of_training(host: tuple[ScriptHost, Path]) -> None:
    """The evaluation draws noise at the same line of the script as the training."""
    imports = "from torch.utils.data import DataLoader, DistributedSampler, TensorDataset\n"
    noise_function = "noised = lambda x, y, g: (x + 0.5 * torch.randn(x.shape, generator=g), y)\n"
    findings, num_equal = compare_with_one_rank(host, SETUP + imports + noise_function + EVALUATION_ON_RANK_0)
    assert (findings, num_equal) == ([], 6)


EXPERTS = """
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.distributed.nn.functional import all_gather

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.experts = nn.ModuleList()
        for number in range(rank * 2 // world, (rank + 1) * 2 // world):
            torch.manual_seed(10 + number)
            self.experts.append(nn.Linear(8, 3))

    def forward(self, x):
        hidden = torch.cat(all_gather(self.first(x).tanh())) if world > 1 else self.first(x).tanh()
        outputs = torch.stack([expert(hidden).tanh() for expert in self.experts]).sum(0)
        total = torch.stack(all_gather(outputs)).sum(0) if world > 1 else outputs
        return total[rank * len(x) : (rank + 1) * len(x)]


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
g = torch.Generator().manual_seed(50 + rank)
for step in range(4):
    x = torch.randn(8, 6, generator=g)
    loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    for name, p in model.named_parameters():
        if "experts" not in name:
            dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
"""


def test_experts_of_each_rank_are_compared_with_one_rank(host: tuple[ScriptHost, Path]) -> None:
    """Experts are initialized differently on each rank and are not averaged.

    A gradient of an expert that is not divided by the number of ranks is reported.
    """
    findings, num_equal = compare_with_one_rank(host, EXPERTS)
    assert (findings, num_equal) == ([], 4)
    script_without_division = EXPERTS.replace("        p.grad /= world", "            p.grad /= world")
    (finding,) = compare_with_one_rank(host, script_without_division)[0]
    assert finding.rule == "ranks.gradient"
    assert "experts.0" in finding.text
    assert "they are 2 times" in finding.text
