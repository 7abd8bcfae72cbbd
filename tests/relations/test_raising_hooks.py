"""Recording hooks that raise: the comparison reports the reason, and no finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from everyrank.audit.finding import Findings
from everyrank.relations import judge_script
from everyrank.rerun import ScriptHost

SCRIPT = """
import sys
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everyrank.rerun.inside as inside


def raises(*args, **kwargs):
    raise RuntimeError("made to raise")


module, _, name = sys.argv[1].partition(":")
owner = getattr(inside, module)
for part in name.split(".")[:-1]:
    owner = getattr(owner, part)
getattr(owner, name.split(".")[-1]).__code__ = raises.__code__  # torch holds bound methods
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(64, 6)
data = TensorDataset(x, x[:, :3].argmax(1))
net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(5 + dist.get_rank())
for x, y in DataLoader(data, 8, sampler=DistributedSampler(data)):
    x = x + torch.randn_like(x)
    loss = F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}")
"""

HOOKS = (
    "steps:_Steps.before_step",
    "steps:_Steps.after_step",
    "steps:_Steps.record_states",
    "steps:shard_of",
    "draws:_Draws.record_or_replace",
    "draws:_Draws.record_values",
    "draws:_Draws.record_sending_line",
    "batches:encode_batch",
    "batches:merge_batches",
    "modules:ModuleNames.parameters",
    "modules:ModuleNames.states",
    "printed:record_line",
    "session:Session.is_last",
    "session:Session.write",
)


@pytest.mark.integration
def test_raising_hook_does_not_stop_the_comparison(tmp_path: Path) -> None:
    """Every hook raises in a run of its own. All runs share one host, which has to survive."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    with ScriptHost([str(path)]) as host:
        for hook in HOOKS:
            findings = Findings()
            judge_script(host, [str(path), hook], 2, findings, updates=2)
            assert list(findings) == [], hook
            assert findings.unchecked, hook
