"""A script is rerun on a different number of ranks with recorded batches, random numbers and learning rates."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from everyrank.errors import CannotRunError, UsageError
from everyrank.rerun import Imposed, ScriptHost, ScriptRecording, process
from everyrank.rerun.inside.expressions import _path

TRAINING = """
import os
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(96, 6)
data = TensorDataset(x, x[:, :3].argmax(1))
net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
net = nn.parallel.DistributedDataParallel(net)
torch.manual_seed(5 + dist.get_rank())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1 * dist.get_world_size(), momentum=0.9)
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb in DataLoader(data, batch_size=8, sampler=sampler):
        xb = xb + 0.1 * torch.randn_like(xb)
        loss = F.cross_entropy(net(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.6f}")
    open("written.txt", "a").write("a line")
"""


def write_script(folder: Path, script: str = TRAINING) -> str:
    """Write the script to train.py and return its path."""
    path = folder / "train.py"
    path.write_text(script)
    return str(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ScriptRecording, ScriptRecording]:
    """Return the script's folder, a run on two ranks, and a run on one rank that replays it."""
    folder = tmp_path_factory.mktemp("script")
    with ScriptHost([write_script(folder)]) as host:
        two_ranks = host.run(ranks=2, float64=True, updates=20)
        one_rank = host.run(ranks=1, float64=True, updates=20, imposed=Imposed(recording=two_ranks))
    return folder, two_ranks, one_rank


def test_one_rank_reproduces_gradients_of_two_ranks(runs: tuple[Path, ScriptRecording, ScriptRecording]) -> None:
    """One rank uses the merged batches, noise and dropout masks of two ranks. Batch norm is over each rank's samples.

    The optimizer steps with the recorded learning rate of 0.2. `rates` is the one that the script has set, 0.1.
    """
    _, two_ranks, one_rank = runs
    assert (two_ranks.failure, one_rank.failure) == ("", "")
    assert one_rank.ranks[0].facts["refused"] == []
    assert [len(rank.updates) for rank in (*two_ranks.ranks, *one_rank.ranks)] == [12, 12, 12]
    assert one_rank.ranks[0].facts["norms"] == 12
    for one_rank_update, two_rank_update in zip(
        one_rank.ranks[0].updates[:6], two_ranks.ranks[0].updates, strict=False
    ):
        assert one_rank_update.rates == [0.1]
        assert two_rank_update.rates == [0.2]
        for name, gradient in two_rank_update.gradients.items():
            torch.testing.assert_close(one_rank_update.gradients[name], gradient, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(one_rank_update.after[name], two_rank_update.after[name], rtol=1e-10, atol=1e-12)
        assert two_rank_update.states.keys() == one_rank_update.states.keys()
        assert any("running_mean" in name for name in two_rank_update.states)


def test_replayed_loss_is_the_mean_and_printed_lines_have_line_numbers(
    runs: tuple[Path, ScriptRecording, ScriptRecording],
) -> None:
    """The loss of one rank is the mean of the two losses. A printed line has its line number and update."""
    folder, two_ranks, one_rank = runs
    assert one_rank.ranks[0].updates[0].losses[0] == pytest.approx(
        sum(rank.updates[0].losses[0] for rank in two_ranks.ranks) / 2
    )
    printed_line = one_rank.ranks[0].printed[0]
    line_number = next(index for index, source_line in enumerate(TRAINING.splitlines(), 1) if "print(" in source_line)
    assert printed_line.place == f"{folder / 'train.py'}:{line_number}"
    assert printed_line.numbers[0] == 0.0
    assert printed_line.update == 6


def test_runs_write_no_files_next_to_the_script(runs: tuple[Path, ScriptRecording, ScriptRecording]) -> None:
    """Each run has a temporary folder as its working directory."""
    folder, *_ = runs
    assert {path.name for path in folder.iterdir()} == {"train.py"}


def test_imposed_order_and_noise_are_equal_on_one_and_two_ranks(tmp_path: Path) -> None:
    """Each of two ranks takes every second row of a batch.

    The samples have the same order and noise as in a run on one rank.
    """
    script = write_script(
        tmp_path,
        """
import os, torch
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
from torch.utils.data import DataLoader, TensorDataset, RandomSampler
class Rows:
    def __init__(self, inner): self.inner = inner
    def __iter__(self): return (batch[rank::world] for batch in self.inner)
    def __len__(self): return len(self.inner)
torch.manual_seed(1)
loader = DataLoader(TensorDataset(torch.arange(24.0)[:, None]), batch_size=8, shuffle=True)
if world > 1:
    loader.sampler.generator = torch.Generator().manual_seed(torch.initial_seed())
    loader = DataLoader(loader.dataset, batch_sampler=Rows(loader.batch_sampler))
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.0)
for (x,) in loader:
    (weight * (x + torch.nn.functional.dropout(torch.randn_like(x), 0.5))).sum().backward()
    optimizer.step(); optimizer.zero_grad()
""",
    )
    with ScriptHost([script]) as host:
        imposed = Imposed(order=True, rows=True)
        one_rank, two_ranks = host.run(ranks=1, imposed=imposed), host.run(ranks=2, imposed=imposed)
    assert (one_rank.failure, two_ranks.failure) == ("", "")
    for index, update in enumerate(one_rank.ranks[0].updates):
        (gradient,) = update.gradients.values()
        local_gradients = [next(iter(rank.updates[index].gradients.values())) for rank in two_ranks.ranks]
        torch.testing.assert_close(sum(local_gradients), gradient)


FAILURES = {
    "raise ValueError('no data')": "rank 0: ValueError: no data",
    "import os; os._exit(3)": "rank 0 ended with status 3",
    "import time; time.sleep(60)": "no end within 2 s; rank 0 is at train.py:1",
    "import sys; sys.exit(0)": "",
    "raise ValueError('no data\\n  in this folder')": "rank 0: ValueError: no data",
    "raise ValueError('\\udcff.csv')": "rank 0: ValueError: \\udcff.csv",
}


def test_script_failure_is_reported_in_one_line(tmp_path: Path) -> None:
    """The host does not raise. It continues with the next run."""
    with ScriptHost([write_script(tmp_path, "")], timeout_seconds=2) as host:
        for script, expected_failure in FAILURES.items():
            write_script(tmp_path, script)
            assert host.run().failure == expected_failure


@pytest.mark.parametrize(
    ("code", "is_ended"), [("time.sleep(60)", True), ("while time.monotonic() < start + 4: pass", False)]
)
def test_ranks_that_use_no_cpu_are_not_waited_for(code: str, is_ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for each other, for example because one of them has skipped a collective."""
    monkeypatch.setattr(process, "_IDLE_SECONDS", 2.0)
    rank = subprocess.Popen([sys.executable, "-c", f"import time; start = time.monotonic()\n{code}"])
    codes, reason = process._wait({rank.pid: 0}, 30.0)
    assert codes == ({} if is_ended else {rank.pid: 0})
    assert ("used the CPU" in reason) is is_ended
    rank.kill()
    rank.wait()


def test_end_of_the_host_ends_running_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold the pipes of the host open, so it would wait for them."""
    monkeypatch.setattr("everyrank.rerun.host.sys", sys)  # a new Python, whose children are the ranks
    host = ScriptHost([write_script(tmp_path, "import time; time.sleep(600)")], timeout_seconds=300)

    def run() -> None:
        with contextlib.suppress(CannotRunError, ValueError):  # its pipes are closed
            host.run()

    with host:
        threading.Thread(target=run, daemon=True).start()
        parent = psutil.Process(host._process.pid)
        deadline = time.monotonic() + 60.0
        while not (ranks := parent.children(recursive=True)) and time.monotonic() < deadline:
            time.sleep(0.1)
    assert ranks
    assert all(not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE for rank in ranks)


RUNNING: dict[str, tuple[str, dict[str, Any]]] = {
    "__file__ is absolute": ("assert os.path.isabs(__file__)", {}),
    "complex number": ("assert torch.tensor(1 + 2j).item() == 1 + 2j", {}),
    "log text without a place for its argument": ("logging.warning('loss', 3.0)", {}),
    "momentum of numpy": ("optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=np.float64(0.9))", {}),
    "losses of a generator": ("torch.autograd.backward(y for y in net(x)); assert net.weight.grad.sum() == 8", {}),
    "both kinds of messages": ("dist.P2POp(dist.isend, x, 0, dist.group.WORLD)", {}),
    "seed by name": ("torch.manual_seed(seed=1)", {"expressions": True, "values": True}),
    "function of the parameters": (
        "func.vmap(net)(x); func.grad(lambda p: func.functional_call(net, p, (x,)).sum())(net.state_dict())",
        {"expressions": True, "values": True},
    ),
    "folder by name": ("os.makedirs(name='out')", {"expressions": True}),
    "class as an argument": ("Cast()(x, dict)", {"expressions": True}),
    "dataset without a length": ("DataLoader(Stream())", {"expressions": True, "values": True}),
    "compiled model": ("assert torch.compile(net)._orig_mod is torch.compile(mode='default')(net)", {}),
    "attention": (
        "torch.nn.TransformerEncoderLayer(2, 1, 4)(torch.ones(1, 3, 2))",
        {"imposed": Imposed(without_dropout=True)},
    ),
    "functions in a sequence": (
        "assert checkpoint.checkpoint_sequential([torch.neg, torch.abs], segments=2, input=x).sum() == 8",
        {"imposed": Imposed(without_checkpointing=True)},
    ),
    "batch as an index": (
        "assert len(list(DataLoader(x, batch_size=None, sampler=BatchSampler(range(4), 2, False)))) == 2",
        {"imposed": Imposed(order=True)},
    ),
}


def test_script_that_runs_by_itself_also_runs_with_the_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line runs before the optimizer steps, and no hook may raise an error."""
    start = """
import logging, os, numpy as np, torch, torch.distributed as dist, torch.func as func
from torch.utils import checkpoint
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

class Stream(IterableDataset):
    def __iter__(self):
        return iter(x)
    def __len__(self):
        raise NotImplementedError

class Cast(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
    def forward(self, x, kind):
        return kind(y=super().forward(x))

dist.init_process_group("gloo")
x, net = torch.ones(4, 2), torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
{line}
net(x).sum().backward()
optimizer.step()
"""
    monkeypatch.chdir(tmp_path)
    write_script(tmp_path, "")
    with ScriptHost(["train.py"]) as host:
        for name, (line, settings) in RUNNING.items():
            write_script(tmp_path, start.format(line=line))
            assert host.run(**settings).failure == "", name


def test_linked_script_imports_the_files_next_to_the_original(tmp_path: Path) -> None:
    """Python also looks for them there."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "model.py").write_text("")
    write_script(tmp_path / "project", "import model")
    link = tmp_path / "train.py"
    link.symlink_to(tmp_path / "project" / "train.py")
    with ScriptHost([str(link)]) as host:
        assert host.run().failure == ""


def test_saved_file_is_known_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint may be saved by a `Path`, and loaded by a string or an open file."""
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    with open("out/a.pt", "w") as file:  # noqa: PTH123  (its name is a string)
        assert _path(Path("out/a.pt")) == _path("out/a.pt") == _path(file) == str(tmp_path.resolve() / "out" / "a.pt")


def test_missing_script_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UsageError), ScriptHost([str(tmp_path / "train.py")]):
        pass
    assert list(tmp_path.iterdir()) == []


def test_module_that_prints_when_it_is_imported(tmp_path: Path) -> None:
    """Its lines are not the answer to a request."""
    with ScriptHost([write_script(tmp_path, "")], modules=["this"]) as host:
        assert host.run().failure == ""


def test_late_answer_is_not_that_to_the_next_request(tmp_path: Path) -> None:
    """The process that runs the script is ended, and the next run reports it."""
    with ScriptHost([write_script(tmp_path, "import time; time.sleep(5)")], timeout_seconds=-60) as host:
        assert host.run().failure.startswith("no answer")
        with pytest.raises(CannotRunError, match="has ended"):
            host.run()


def test_script_that_exits_with_its_main_function_comes_to_its_end(tmp_path: Path) -> None:
    """`sys.exit(main())` is the usual last line of a program."""
    with ScriptHost([write_script(tmp_path, "import sys\nsys.exit(None)")]) as host:
        assert host.run().ranks[0].facts["came_to_end"]


def test_value_that_is_no_number_stays_the_one_that_the_script_draws(tmp_path: Path) -> None:
    """Only a checksum of it is recorded. Batch norm of the merged samples takes its input also by name."""
    script = write_script(
        tmp_path,
        """
import random, torch
net = torch.nn.Linear(2, 1)
torch.nn.BatchNorm1d(2)(input=torch.ones(2, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    net(torch.ones(1, 2)).sum().backward()
    assert random.choice(["flip", "crop"]) in ("flip", "crop")
    optimizer.step()
""",
    )
    with ScriptHost([script]) as host:
        recording = host.run(ranks=2)
        assert host.run(imposed=Imposed(recording=recording)).failure == recording.failure == ""


def test_loader_of_rank_0_does_not_shift_the_others(tmp_path: Path) -> None:
    """Rank 0 constructs one more loader and evaluates the training data. The gradients are those of both ranks."""
    script = write_script(
        tmp_path,
        """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
dist.init_process_group("gloo")
torch.manual_seed(0)
data = torch.randn(16, 2)
if dist.get_rank() == 0:
    evaluation = DataLoader(data, 4)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
training = DataLoader(data, 4, sampler=DistributedSampler(data))
for epoch in range(3):
    for x in training:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    if dist.get_rank() == 0:
        with torch.no_grad():
            print(sum(net.module(x).mean() for x in [*evaluation, *training]))
""",
    )
    with ScriptHost([script]) as host:
        two_ranks = host.run(ranks=2, float64=True)
        one_rank = host.run(float64=True, imposed=Imposed(recording=two_ranks))
    assert (two_ranks.failure, one_rank.failure, one_rank.ranks[0].facts["refused"]) == ("", "", [])
    assert len(one_rank.ranks[0].updates) == 6
    for expected, actual in zip(two_ranks.ranks[0].updates, one_rank.ranks[0].updates, strict=True):
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(actual.gradients[name], gradient, rtol=1e-10, atol=1e-12)
