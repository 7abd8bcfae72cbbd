"""A script runs again on other ranks with the batches, draws and rates of an earlier run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from everyrank.rerun import Imposed, ScriptHost, ScriptRecording

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


def written(folder: Path, text: str = TRAINING) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ScriptRecording, ScriptRecording]:
    folder = tmp_path_factory.mktemp("script")
    with ScriptHost([written(folder)]) as host:
        two = host.run(ranks=2, float64=True, updates=20)
        one = host.run(ranks=1, float64=True, updates=20, imposed=Imposed(recording=two))
    return folder, two, one


def test_one_rank_gets_the_gradients_of_two(runs: tuple[Path, ScriptRecording, ScriptRecording]) -> None:
    """Batches, noise, dropout masks and local batch norm of the ranks are put together; rates are theirs."""
    _, two, one = runs
    assert (two.failure, one.failure) == ("", "")
    assert one.ranks[0].facts["refused"] == []
    assert [len(rank.updates) for rank in (*two.ranks, *one.ranks)] == [12, 12, 12]
    assert one.ranks[0].facts["norms"] == 12
    for ours, theirs in zip(one.ranks[0].updates[:6], two.ranks[0].updates, strict=False):
        assert ours.rates == [0.1]
        assert theirs.rates == [0.2]
        for name, gradient in theirs.gradients.items():
            torch.testing.assert_close(ours.gradients[name], gradient, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(ours.after[name], theirs.after[name], rtol=1e-10, atol=1e-12)
        assert theirs.states.keys() == ours.states.keys()
        assert any("running_mean" in name for name in theirs.states)


def test_losses_are_the_mean_and_lines_have_their_place(runs: tuple[Path, ScriptRecording, ScriptRecording]) -> None:
    """The loss of the whole batch is the mean of the two; a printed line knows where it was printed."""
    folder, two, one = runs
    assert one.ranks[0].updates[0].losses[0] == pytest.approx(sum(rank.updates[0].losses[0] for rank in two.ranks) / 2)
    line = one.ranks[0].printed[0]
    number = next(index for index, text in enumerate(TRAINING.splitlines(), 1) if "print(" in text)
    assert line.place == f"{folder / 'train.py'}:{number}"
    assert line.numbers[0] == 0.0
    assert line.update == 6


def test_nothing_is_written_beside_the_script(runs: tuple[Path, ScriptRecording, ScriptRecording]) -> None:
    """Each run writes into a scratch folder."""
    folder, *_ = runs
    assert {path.name for path in folder.iterdir()} == {"train.py"}


def test_rows_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    """One order, and noise by sample: what two ranks that take every second row of a batch draw is what one draws."""
    script = written(
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
        one, two = host.run(ranks=1, imposed=imposed), host.run(ranks=2, imposed=imposed)
    assert (one.failure, two.failure) == ("", "")
    for index, update in enumerate(one.ranks[0].updates):
        (whole,) = update.gradients.values()
        parts = [next(iter(rank.updates[index].gradients.values())) for rank in two.ranks]
        torch.testing.assert_close(sum(parts), whole)


FAILURES = {
    "raise ValueError('no data')": "rank 0: ValueError: no data",
    "import os; os._exit(3)": "rank 0 ended with status 3",
    "import time; time.sleep(60)": "no end within 2 s",
    "import sys; sys.exit(0)": "",
}


def test_a_failure_of_the_script_is_one_line(tmp_path: Path) -> None:
    """The harness raises nothing for what a script does, and goes on to the next run."""
    with ScriptHost([written(tmp_path, "")], timeout_seconds=2) as host:
        for text, failure in FAILURES.items():
            written(tmp_path, text)
            assert host.run().failure == failure
