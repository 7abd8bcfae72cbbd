"""Audit hooks that raise: the script continues, and the report lists what was not checked."""

from __future__ import annotations

import json
from pathlib import Path

from processes import Cli

SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from everyrank.audit.watch.recorder import HOOKS

dist.init_process_group("gloo")
torch.manual_seed(0)
generator = torch.Generator().manual_seed(dist.get_rank())
data = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def raises(*args, **kwargs):
    raise RuntimeError("made to raise")


def update(optimizer, scaler, schedule, held_out, x, y):
    optimizer.zero_grad()
    x = x + 0.1 * torch.randn(x.shape, generator=generator)
    scaler.scale(nn.functional.cross_entropy(wrapped(x), y)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    with torch.no_grad():
        wrapped.eval()
        loss = nn.functional.cross_entropy(wrapped(held_out), torch.zeros(8, dtype=torch.long))
        dist.all_reduce(loss)
        wrapped.train()
    loss.item()


names = []
for number, hook in enumerate([None, *HOOKS, "all"]):
    chosen = HOOKS if hook == "all" else [hook] if hook is not None else []
    before = [one.__wrapped__ for one in chosen]
    for one in chosen:
        one.__wrapped__ = raises
    wrapped = DistributedDataParallel(model)
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    empty.to_empty(device="cpu")
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for x, y in DataLoader(data, batch_size=8, sampler=DistributedSampler(data)):
        update(optimizer, scaler, schedule, torch.randn(8, 4), x, y)
        break
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "model.pt")
    for one, function in zip(chosen, before):
        one.__wrapped__ = function
    names.append(number)
dist.destroy_process_group()
assert len(names) == len(HOOKS) + 2
"""


def test_script_continues_when_hooks_raise(cli: Cli, tmp_path: Path) -> None:
    """Each hook raises in one update, and then all hooks raise together."""
    (tmp_path / "train.py").write_text(SCRIPT)
    args = ("--processes", "2", "--updates", "200", "--json", "found.json", "train.py")
    result = cli(tmp_path, "audit", *args)
    assert result.status == 0, result.out + result.err
    report = json.loads((tmp_path / "found.json").read_text())
    assert report["updates"] >= 20, "the script was stopped before its end"
    assert [finding["rule"] for finding in report["findings"] if finding["level"] in ("FAIL", "WARN")] == []
    unchecked = [line for line in report["not_checked"] if "made to raise" in line]
    assert len(unchecked) >= 10, report["not_checked"]
    assert all("the script continued" in line for line in unchecked)
