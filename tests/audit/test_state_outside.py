"""Buffers outside the wrapped model, and losses with a minus sign."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from processes import Cli

CENTER_LOSS_SCRIPT = """
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
REDUCE_MEAN = "dist.all_reduce(mean); mean /= dist.get_world_size()"


@pytest.mark.parametrize(
    ("reduce", "divisor", "expected"),
    [
        (REDUCE_MEAN, "2", set[str]()),
        ("pass", "2", {"replicas.buffers"}),
        (REDUCE_MEAN, "1", {"gradient.scale"}),
    ],
    ids=["right", "a center of its own", "not divided"],
)
def test_unsynchronised_buffer_of_a_loss_module_is_found(
    reduce: str, divisor: str, expected: set[str], cli: Cli, tmp_path: Path
) -> None:
    """The script must synchronise a buffer of a loss module. Batch norm statistics in this module are not reported."""
    (tmp_path / "train.py").write_text(CENTER_LOSS_SCRIPT.replace("REDUCE", reduce).replace("DIVISOR", divisor))
    result = cli(tmp_path, "audit", "train.py")
    rules = set(re.findall(r"^(?:FAIL|WARN|NOTE) +\S+ +(\S+)", result.out, re.MULTILINE))
    assert rules == expected, result.out + result.err
    if "replicas.buffers" in expected:
        assert "CenterLoss.center" in result.out


def test_teacher_with_different_weights_on_each_rank_is_found(cli: Cli, tmp_path: Path) -> None:
    script = CENTER_LOSS_SCRIPT.replace("REDUCE", REDUCE_MEAN).replace("DIVISOR", "2")
    create_teacher = "teacher = nn.Linear(6, 4)"
    (tmp_path / "train.py").write_text(
        script.replace(create_teacher, f"torch.manual_seed(dist.get_rank())\n{create_teacher}")
    )
    result = cli(tmp_path, "audit", "--no-compare", "train.py")
    rules = set(re.findall(r"^(?:FAIL|WARN|NOTE) +\S+ +(\S+)", result.out, re.MULTILINE))
    assert rules == {"replicas.frozen"}, result.out + result.err
    assert "weight, bias" in result.out
