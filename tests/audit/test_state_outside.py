"""Buffers that no wrapper synchronises, and losses with a minus sign before them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from processes import Cli

CENTER = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class CenterLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 4))
        self.norm = nn.BatchNorm1d(4, affine=False)

    def forward(self, student, teacher):
        loss = -(torch.softmax(teacher - self.center, -1) * torch.log_softmax(student, -1)).sum(-1).mean()
        with torch.no_grad():
            self.norm(teacher)
            mean = teacher.mean(0, keepdim=True)
            REDUCE
            self.center.mul_(0.9).add_(mean, alpha=0.1)
        return loss

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(6, 4))
teacher = nn.Linear(6, 4).requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = CenterLoss()
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(8):
    optimizer.zero_grad()
    for micro in range(2):
        x = torch.randn(8, 6, generator=generator)
        (criterion(model(x), teacher(x)) / DIVISOR).backward()
    optimizer.step()
dist.destroy_process_group()
"""
REDUCED = "dist.all_reduce(mean); mean /= dist.get_world_size()"


@pytest.mark.parametrize(
    ("reduce", "divisor", "expected"),
    [
        (REDUCED, "2", set[str]()),
        ("pass", "2", {"replicas.buffers"}),
        (REDUCED, "1", {"gradient.scale"}),
    ],
    ids=["right", "a center of its own", "not divided"],
)
def test_a_loss_with_a_center(reduce: str, divisor: str, expected: set[str], cli: Cli, tmp_path: Path) -> None:
    """A buffer of a loss module is the script's to synchronise; the statistics of batch norm in it are not meant."""
    (tmp_path / "train.py").write_text(CENTER.replace("REDUCE", reduce).replace("DIVISOR", divisor))
    done = cli(tmp_path, "audit", "train.py")
    found = set(re.findall(r"^(?:FAIL|WARN|NOTE) +\S+ +(\S+)", done.out, re.MULTILINE))
    assert found == expected, done.out + done.err
    if "replicas.buffers" in expected:
        assert "CenterLoss.center" in done.out


def test_a_teacher_with_other_weights_on_each_rank(cli: Cli, tmp_path: Path) -> None:
    script = CENTER.replace("REDUCE", REDUCED).replace("DIVISOR", "2")
    made = "teacher = nn.Linear(6, 4)"
    (tmp_path / "train.py").write_text(script.replace(made, f"torch.manual_seed(dist.get_rank())\n{made}"))
    done = cli(tmp_path, "audit", "--no-compare", "train.py")
    found = set(re.findall(r"^(?:FAIL|WARN|NOTE) +\S+ +(\S+)", done.out, re.MULTILINE))
    assert found == {"replicas.frozen"}, done.out + done.err
    assert "weight, bias" in done.out
