"""Layers split over ranks: these ranks read the same samples, and sum gradients of replicated parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditing import audit_forked_script
from forkserver import ForkServer

SCRIPT = """
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Scale(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(torch.ones(6), mesh, [Replicate()]))

    def forward(self, x):
        part = x.chunk(self.mesh.size(), 0)[self.mesh.get_local_rank()]
        weight = self.weight.to_local(grad_placements=[Partial()])
        whole = DTensor.from_local(part * weight, self.mesh, [Shard(0)]).redistribute(placements=[Replicate()])
        return whole.to_local()


class Net(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.scale, self.up, self.down = Scale(mesh), nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.scale(x))))


dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
net = parallelize_module(Net(mesh["tp"]), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
x = torch.randn(96, 6)
data = TensorDataset(x, x[:, :3].argmax(1))
sampler = DistributedSampler(data, mesh["dp"].size(), mesh["dp"].get_local_rank())
loader = DataLoader(data, batch_size=8, sampler=sampler)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
for xb, yb in loader:
    loss = nn.functional.cross_entropy(net(xb), yb)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

MUTATIONS = {
    "samples by the rank": (
        'mesh["dp"].size(), mesh["dp"].get_local_rank()',
        "",
        "data.different",
        "each rank feeds the model different samples",
        "sampler = DistributedSampler(",
    ),
    "the gradient of a part": (
        "to_local(grad_placements=[Partial()])",
        "to_local()",
        "replicas.drift",
        "to_local() has no grad_placements",
        "weight = self.weight.to_local()",
    ),
}


@pytest.mark.integration
@pytest.mark.parametrize("name", MUTATIONS)
def test_mistake_with_split_layers_is_found_with_its_line(python: ForkServer, tmp_path: Path, name: str) -> None:
    """The finding has the cause, and its lines include the line to change."""
    original, replacement, rule, text, line = MUTATIONS[name]
    assert original in SCRIPT
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace(original, replacement))
    (tmp_path / "run").mkdir()
    findings_by_rule = {
        finding.rule: finding for finding in audit_forked_script(python, tmp_path / "run", script).findings
    }
    assert rule in findings_by_rule, findings_by_rule
    assert text in findings_by_rule[rule].text
    number = next(
        line_number for line_number, line_text in enumerate(script.read_text().splitlines(), 1) if line in line_text
    )
    assert f"{script}:{number}" in findings_by_rule[rule].lines


@pytest.mark.integration
def test_correct_split_layers_have_no_findings(python: ForkServer, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "run").mkdir()
    audit = audit_forked_script(python, tmp_path / "run", script)
    assert [finding for finding in audit.findings if finding.level in ("FAIL", "WARN")] == []
