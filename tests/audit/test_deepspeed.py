"""DeepSpeed under audit. A fake engine with the same interface keeps the gradient in a flat partition.

The real one needs minutes to install. benchmarks/deepspeed_mistakes.py runs it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from auditing import record_forked_script
from forkserver import ForkServer

ENGINE = """
import torch
import torch.distributed as dist
from torch import nn


class DeepSpeedEngine(nn.Module):
    def __init__(self, model, steps):
        super().__init__()
        self.module, self.steps, self.micro = model, steps, 0
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        self.partitions = [nn.Parameter(flat.chunk(self.world_size)[self.rank].clone())]
        self.optimizer = torch.optim.SGD(self.partitions, lr=0.1)

    def forward(self, values):
        return self.module(values)

    def backward(self, loss):
        (loss / self.steps).backward()
        self.micro += 1
        if self.is_gradient_accumulation_boundary():
            for parameter in self.module.parameters():
                parameter.full_grad, parameter.grad = parameter.grad, None
                dist.all_reduce(parameter.full_grad)
                parameter.full_grad /= self.world_size

    def is_gradient_accumulation_boundary(self):
        return self.micro % self.steps == 0

    @torch.no_grad()
    def step(self):
        if not self.is_gradient_accumulation_boundary():
            return
        whole = torch.cat([parameter.full_grad.flatten() for parameter in self.module.parameters()])
        self.partitions[0].grad = whole.chunk(self.world_size)[self.rank].clone()
        self.optimizer.step()
        parts = [torch.empty_like(part) for part in whole.chunk(self.world_size)]
        dist.all_gather(parts, self.partitions[0].detach())
        start = 0
        for parameter in self.module.parameters():
            parameter.copy_(torch.cat(parts)[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()
"""
SCRIPT = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
generator = torch.Generator().manual_seed(3)
data = TensorDataset(torch.randn(96, 10, generator=generator), torch.randn(96, 2, generator=generator))
torch.manual_seed(0)
engine = DeepSpeedEngine(nn.Sequential(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 2)), steps=3)
sampler = DistributedSampler(data)
loader = DataLoader(data, 4, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for values, target in loader:
        loss = F.mse_loss(engine(values), target)
        engine.backward(loss)
        engine.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("before", "after", "rules"),
    [
        ("", "", []),
        ("engine.backward(loss)", "engine.backward(loss / 3)", ["gradient.scale"]),
        ("    sampler.set_epoch(epoch)\n", "", ["data.epoch"]),
    ],
)
def test_audit_reads_gradients_with_safe_get_full_grad(
    python: ForkServer, tmp_path: Path, before: str, after: str, rules: list[str]
) -> None:
    package = tmp_path / "deepspeed"
    (package / "runtime").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "runtime" / "__init__.py").touch()
    (package / "runtime" / "engine.py").write_text(ENGINE)
    (package / "utils.py").write_text("def safe_get_full_grad(parameter):\n    return parameter.full_grad\n")
    (tmp_path / "train.py").write_text(SCRIPT.replace(before, after) if before else SCRIPT)
    audit = record_forked_script(python, tmp_path, tmp_path / "train.py").judge()
    assert [finding.rule for finding in audit.findings] == rules, audit.findings
    assert not any("DeepSpeed" in text for text in audit.unchecked)
