"""Idioms of public scripts that are correct: each script runs under audit and has no findings."""

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
VALIDATION_WITH_GRADIENTS = """
for epoch in range(6):
    model.train()
    optimizer.zero_grad()
    F.cross_entropy(model(x[:8]), y[:8]).backward()
    optimizer.step()
    model.eval()
    print(F.cross_entropy(model(x), y).item())
"""
RANKS_BY_PROCESS = """
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
    "validation with gradients": f"{HEAD}{VALIDATION_WITH_GRADIENTS}",
    "ranks by Process": f"{HEAD}{RANKS_BY_PROCESS}",
    "cuda.FloatTensor": HEAD
    + "Tensor = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor\n"
    + "x = x.type(Tensor)\nassert Tensor(3).shape == (3,)\n"
    + TRAIN,
}


def failures_and_warnings(stdout: str) -> list[str]:
    """Return the lines with FAIL or WARN."""
    return re.findall(r"^(?:FAIL|WARN) .*$", stdout, re.MULTILINE)


@pytest.mark.parametrize("kind", SCRIPTS)
def test_correct_idiom_has_no_findings(kind: str, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "helper").mkdir()
    (tmp_path / "helper" / "__init__.py").write_text("from . import more\n")
    (tmp_path / "helper" / "more.py").write_text("import torch.distributed as dist\n")
    (tmp_path / "train.py").write_text(SCRIPTS[kind])
    result = cli(tmp_path, "audit", "train.py")
    assert result.status == 0, result.out + result.err
    assert failures_and_warnings(result.out) == []
    assert "had failed" not in result.out
    assert "nothing wrong found" in result.out
    ranks = 2 if "Process" in kind else 1
    assert f"on {ranks} rank" in result.out


LARGE_DATASET = """
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
def test_data_findings_of_epochs_longer_than_twenty_thousand_samples(
    sampler: str, expected: list[str], cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        HEAD.replace("nn.BatchNorm1d(8)", "nn.Tanh()") + LARGE_DATASET.replace("SAMPLER", sampler)
    )
    result = cli(tmp_path, "audit", "--processes", "2", "train.py")
    assert [line.split()[2] for line in failures_and_warnings(result.out)] == expected, result.out + result.err


def test_equal_samples_of_dummy_data_have_no_findings(cli: Cli, tmp_path: Path) -> None:
    """A sampler splits the data, but the ranks feed equal rows to the model."""
    text = HEAD.replace("nn.BatchNorm1d(8)", "nn.Tanh()") + LARGE_DATASET.replace(
        "torch.randn(30000", "torch.ones(30000"
    )
    (tmp_path / "train.py").write_text(text.replace("SAMPLER", "sampler = DistributedSampler(seen)"))
    result = cli(tmp_path, "audit", "--processes", "2", "train.py")
    assert failures_and_warnings(result.out) == [], result.out
    assert "all samples" in result.out


def test_epochs_too_long_to_record_are_not_checked(cli: Cli, tmp_path: Path) -> None:
    """The audit lists the unchecked order for training and for evaluation. It has no data finding."""
    text = HEAD.replace("nn.BatchNorm1d(8)", "nn.Tanh()") + LARGE_DATASET.replace("30000", "210000") + EVALUATION
    (tmp_path / "train.py").write_text(text.replace("SAMPLER", "sampler = None\ntorch.manual_seed(dist.get_rank())"))
    result = cli(tmp_path, "audit", "--processes", "2", "train.py")
    unchecked = [line for line in result.out.splitlines() if "which samples each rank" in line]
    assert ["reads" in line for line in unchecked] == [True, False], result.out + result.err
    assert "data." not in " ".join(failures_and_warnings(result.out))


EVALUATION = """
with torch.no_grad():
    for inputs, labels in DataLoader(seen, 1000, shuffle=True):
        print(F.cross_entropy(wrapped(inputs), labels).item())
        break
"""
