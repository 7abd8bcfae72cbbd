"""Every unchanged recipe under audit has no FAIL and no WARN. If gradients cannot be checked, a line gives the reason.

The fork server starts the ranks, as torchrun would. tests/integration runs the commands of the headers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from auditing import audit_forked_script
from forkserver import ForkServer
from recipes.test_recipes import ALL_RECIPES, OPERATION_RECIPES, write_recipe
from recipes.test_rpc import RPC_RECIPES

SPLIT = "gradients: layers are split over ranks"
# (ranks, start of a line about what the audit did not check)
RECIPES = {
    "dataparallel": (1, "communication between ranks: "),
    "ddp_accumulate": (2, ""),
    "ddp_torchrun": (2, ""),
    "ring_allreduce": (2, SPLIT),
    "tensor": (2, SPLIT),
}
# similar recipes, and recipes with four ranks: only in make test-at-length
MORE_RECIPES = {
    "ddp_syncbn": (2, ""),
    "iterable_sharding": (2, "the order of epochs: the data is a stream"),
    "fsdp": (2, ""),
    "checkpoint_resume": (2, ""),
    "context": (2, SPLIT),
    "contrastive": (2, "samplers: the script trains without a DataLoader"),
    "ddp_amp": (2, ""),
    "expert": (2, SPLIT),
    "model_parallel_two_devices": (1, "communication between ranks: "),
    "pipeline": (2, SPLIT),
    "single": (1, "communication between ranks: "),
    "zero1": (2, ""),
    "ddp_compressed": (2, ""),
    "local_sgd": (2, ""),
    "ddp_by_hand": (2, ""),
    "ddp_uneven": (2, "gradients and replicas under torch's Join"),
    "distributed_evaluation": (2, ""),
    "elastic_torchrun": (2, ""),
    "fsdp_tensor": (4, SPLIT),
    "hsdp": (4, ""),
    "multi_node": (2, ""),
    "parameter_server": (3, SPLIT),
    "weighted_sampler": (2, ""),
}
SERVER_RECIPES = {"parameter_server"}  # the process with the optimizer runs no model, so the audit counts no updates
BY_COMMAND = {
    "ddp_spawn",
    "horovod_ddp",
    "imagenet_ddp",
    "mpi",
    "parameter_server_async",
    "parameter_server_rpc",
    "ray_actors",
    "slurm",
}  # in tests/integration


def test_all_recipes_are_audited() -> None:
    assert {*RECIPES, *MORE_RECIPES, *BY_COMMAND, *OPERATION_RECIPES, *RPC_RECIPES} == set(
        ALL_RECIPES
    )  # OPERATION_RECIPES train nothing


@pytest.mark.parametrize(
    "name", [*RECIPES, *(pytest.param(name, marks=pytest.mark.integration) for name in MORE_RECIPES)]
)
def test_recipe_has_no_findings(python: ForkServer, tmp_path: Path, name: str) -> None:
    processes, not_checked = {**RECIPES, **MORE_RECIPES}[name]
    write_recipe(tmp_path, name)
    # These recipes count the updates of an epoch. A shortened epoch would end before the first checkpoint.
    settings = {"batches": 0} if name in ("elastic_torchrun", "checkpoint_resume") else {}
    audit = audit_forked_script(python, tmp_path, tmp_path / f"{name}.py", processes=processes, **settings)
    assert [finding for finding in audit.findings if finding.level in ("FAIL", "WARN")] == []
    assert audit.world_size == processes
    assert audit.updates >= 4 or name in SERVER_RECIPES
    assert "ddp.batchnorm" not in [finding.rule for finding in audit.findings]  # SyncBatchNorm is not reported either
    assert any(line.startswith(not_checked) for line in audit.unchecked), audit.unchecked
    assert not list(tmp_path.glob("*/0*")), "checkpoints were not redirected"


def test_broadcast_instead_of_parameter_averaging_is_found(python: ForkServer, tmp_path: Path) -> None:
    """After each step the parameters are equal on all ranks, but the updates of other ranks are lost."""
    write_recipe(tmp_path, "local_sgd")
    script = tmp_path / "local_sgd.py"
    text = script.read_text()
    assert text.count("dist.all_reduce(flat)") == 1
    text = text.replace("default=4", "default=1")  # parameter averaging
    script.write_text(text.replace("dist.all_reduce(flat)", "dist.broadcast(flat, 0)"))
    audit = audit_forked_script(python, tmp_path, script, processes=2)
    assert ("FAIL", "gradient.local") in [(finding.level, finding.rule) for finding in audit.findings]


SPARSE_SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(40, 8, sparse=True), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for update in range(6):
    rows = torch.randint(40, (1, 2))[:, 0]  # a single number, with the stride of two
    loss = nn.functional.cross_entropy(model(rows), rows % 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_sparse_gradients_are_checked(python: ForkServer, tmp_path: Path) -> None:
    """A batch of one number has the stride of a longer row."""
    (tmp_path / "bags.py").write_text(SPARSE_SCRIPT)
    audit = audit_forked_script(python, tmp_path, tmp_path / "bags.py", processes=1)
    assert [finding for finding in audit.findings if finding.level in ("FAIL", "WARN")] == []
    assert audit.updates == 6
