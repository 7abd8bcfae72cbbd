"""What public scripts do that nobody here would write: each runs, and nothing wrong is said of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from processes import Cli

HEAD = """
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(64, 4), torch.randint(2, (64,))
"""
TRAIN = """
for step in range(6):
    optimizer.zero_grad()
    F.cross_entropy(model(x[:8]), y[:8]).backward()
    optimizer.step()
"""
VALIDATED = """
for epoch in range(6):
    model.train()
    optimizer.zero_grad()
    F.cross_entropy(model(x[:8]), y[:8]).backward()
    optimizer.step()
    model.eval()
    print(F.cross_entropy(model(x), y).item())
"""
RANKS = """
import os
import torch.distributed as dist
import torch.multiprocessing as mp

def train(rank):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "29731"
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(1)
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        own = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        F.cross_entropy(wrapped(own), y[:8]).backward()
        optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.set_start_method("spawn")
    ranks = [mp.Process(target=train, args=(rank,)) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
"""
SCRIPTS = {
    "a traced model": f"{HEAD}torch.jit.trace(model, x[:2])\n{TRAIN}",
    "a package that knows of ranks": f"import helper\n{HEAD}{TRAIN}",
    "validation with gradients": f"{HEAD}{VALIDATED}",
    "ranks by Process": f"{HEAD}{RANKS}",
    "cuda.FloatTensor": HEAD
    + "Tensor = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor\n"
    + "x = x.type(Tensor)\nassert Tensor(3).shape == (3,)\n"
    + TRAIN,
}


def wrong(stdout: str) -> list[str]:
    return re.findall(r"^(?:FAIL|WARN) .*$", stdout, re.MULTILINE)


@pytest.mark.parametrize("kind", SCRIPTS)
def test_it_runs_and_is_right(kind: str, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "helper").mkdir()
    (tmp_path / "helper" / "__init__.py").write_text("from . import more\n")
    (tmp_path / "helper" / "more.py").write_text("import torch.distributed as dist\n")
    (tmp_path / "train.py").write_text(SCRIPTS[kind])
    done = cli(tmp_path, "audit", "train.py")
    assert done.status == 0, done.out + done.err
    assert wrong(done.out) == []
    assert "had failed" not in done.out
    assert "nothing wrong found" in done.out
    ranks = 2 if "Process" in kind else 1
    assert f"on {ranks} rank" in done.out


LARGE = """
import torch.distributed as dist
from torch.utils.data import DistributedSampler
dist.init_process_group("gloo")
seen = TensorDataset(torch.randn(30000, 4), torch.randint(2, (30000,)))
wrapped = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
SAMPLER
for inputs, labels in DataLoader(seen, 100, sampler=sampler, shuffle=sampler is None):
    optimizer.zero_grad()
    F.cross_entropy(wrapped(inputs), labels).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [("sampler = None", ["data.same"]), ("sampler = DistributedSampler(seen)", [])],
    ids=["all", "divided"],
)
def test_epochs_longer_than_twenty_thousand_samples(
    sampler: str, expected: list[str], cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        HEAD.replace("nn.BatchNorm1d(8)", "nn.Tanh()") + LARGE.replace("SAMPLER", sampler)
    )
    done = cli(tmp_path, "audit", "--processes", "2", "train.py")
    assert [line.split()[2] for line in wrong(done.out)] == expected, done.out + done.err


def test_samples_that_are_all_equal(cli: Cli, tmp_path: Path) -> None:
    """Stand-in data: a sampler divides it, and each rank feeds the same rows."""
    text = HEAD.replace("nn.BatchNorm1d(8)", "nn.Tanh()") + LARGE.replace("torch.randn(30000", "torch.ones(30000")
    (tmp_path / "train.py").write_text(text.replace("SAMPLER", "sampler = DistributedSampler(seen)"))
    done = cli(tmp_path, "audit", "--processes", "2", "train.py")
    assert wrong(done.out) == [], done.out
    assert "all samples" in done.out


def test_epochs_too_long_to_be_written_down(cli: Cli, tmp_path: Path) -> None:
    """What is not known of their order is said, in training and in evaluation; nothing wrong is said in its place."""
    text = HEAD.replace("nn.BatchNorm1d(8)", "nn.Tanh()") + LARGE.replace("30000", "210000") + EVALUATED
    (tmp_path / "train.py").write_text(text.replace("SAMPLER", "sampler = None\ntorch.manual_seed(dist.get_rank())"))
    done = cli(tmp_path, "audit", "--processes", "2", "train.py")
    said = [line for line in done.out.splitlines() if "which samples each rank" in line]
    assert ["reads" in line for line in said] == [True, False], done.out + done.err
    assert "data." not in " ".join(wrong(done.out))


EVALUATED = """
with torch.no_grad():
    for inputs, labels in DataLoader(seen, 1000, shuffle=True):
        print(F.cross_entropy(wrapped(inputs), labels).item())
        break
"""
