"""Ranks that each train their own model: a warning, or a failure if the script only forgets to average gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from auditing import audit_forked_script
from everyrank.audit.watch.gradients import Gradients
from everyrank.audit.watch.losses import Losses
from everyrank.audit.watch.recorder import Recorder, Settings
from forkserver import ForkServer

SCRIPT = """
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.randn(120, 6, generator=torch.Generator().manual_seed(1))
y = x[:, :3].argmax(1)
torch.manual_seed(50 + rank)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
own = torch.randint(0, len(x), (len(x),), generator=torch.Generator().manual_seed(9 + rank))
for rows in own.split(12):
    loss = F.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    # in the loop
together = model(x).softmax(1).detach()
dist.all_reduce(together)
print(f"rank {rank}: {(together.argmax(1) == y).float().mean():.3f}")
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("added_line", "level"), [("", "WARN"), ("shown = loss.detach().clone(); dist.all_reduce(shown)", "FAIL")]
)
def test_ensemble_is_a_warning(python: ForkServer, tmp_path: Path, added_line: str, level: str) -> None:
    """A script that all-reduces the loss for its output trains one model, so the missing average is a failure."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("# in the loop", added_line))
    audit = audit_forked_script(python, tmp_path, path)
    levels = {finding.rule: finding.level for finding in audit.findings}
    assert levels["gradient.local"] == levels["replicas.drift"] == levels["clip.local"] == level


CROSS_VALIDATION = """
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.randn(120, 6, generator=torch.Generator().manual_seed(1))
data, samples = TensorDataset(x, x[:, :3].argmax(1)), torch.arange(120)
torch.manual_seed(50 + rank)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
is_held_out = samples // 30 == rank
training = DataLoader(Subset(data, samples[~is_held_out].tolist()), 15, shuffle=True)
held_out = DataLoader(Subset(data, samples[is_held_out].tolist()), 10)
for epoch in range(2):
    for inputs, labels in training:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    hits = torch.zeros(1)
    with torch.no_grad():
        for inputs, labels in held_out:
            hits += (model.eval()(inputs).argmax(1) == labels).sum()
    model.train()
dist.all_reduce(hits)
print(hits / 60)
dist.destroy_process_group()
"""


def test_cross_validation_is_a_warning(python: ForkServer, tmp_path: Path) -> None:
    """Each rank trains on other samples than it evaluates, and on those that another rank evaluates."""
    path = tmp_path / "train.py"
    path.write_text(CROSS_VALIDATION)
    levels = {finding.rule: finding.level for finding in audit_forked_script(python, tmp_path, path).findings}
    assert levels["data.split"] == levels["eval.shard"] == "WARN"
    assert "FAIL" not in levels.values()


def test_each_new_model_has_new_names(tmp_path: Path) -> None:
    """A new parameter may get the id of a deleted one, and on another rank it may not."""
    gradients = Gradients(Recorder(Settings(str(tmp_path))), Losses())
    names: list[str] = []
    for _ in range(20):
        model = torch.nn.Linear(2, 2)
        gradients.watch(model)
        names += [gradients.names[id(parameter)] for parameter in model.parameters()]
        assert gradients.hooked == {id(parameter) for parameter in model.parameters()}
        gradients.parameters = []
        del model
    assert names[:4] == ["weight", "bias", "Linear.weight (2)", "Linear.bias (3)"]
    assert len(set(names)) == 40
    assert not gradients.names


def test_gradients_of_lazy_parameters_are_recorded(tmp_path: Path) -> None:
    gradients = Gradients(Recorder(Settings(str(tmp_path))), Losses())
    model = torch.nn.LazyLinear(2)
    gradients.watch(model)
    assert gradients.has_lazy
    output = model(torch.ones(1, 3))
    gradients.watch(model)
    output.sum().backward()
    assert {name for _, name in gradients.backward_grads} == {"weight", "bias"}
