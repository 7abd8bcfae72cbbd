"""--same: larger batches and fewer of them per update are the same training."""

from __future__ import annotations

from pathlib import Path

import pytest

from everyrank.audit.finding import Findings
from everyrank.relations.same import judge_settings
from everyrank.rerun import ScriptHost

SCRIPT = """
import argparse
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--accum", type=int, default=2)
parser.add_argument("--batch", type=int, default=4)
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(64, 6)
data = TensorDataset(x, x[:, :3].argmax(1))
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3)))
torch.manual_seed(5 + dist.get_rank())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, args.batch, sampler=DistributedSampler(data))
for epoch in range(2):
    for step, (xb, yb) in enumerate(loader):
        xb = xb + 0.1 * torch.randn_like(xb)
        (F.cross_entropy(model(xb), yb) / args.accum).backward()
        if (step + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()
"""

WRONG = {
    "same.gradient": (" / args.accum).backward", ").backward"),
    "same.rate": ("lr=0.1", "lr=0.025 * args.batch"),
    "same.parameters": ("lr=0.1", "lr=0.1, momentum=0.1 * args.accum"),
}


def found_in(folder: Path, text: str, more: list[str]) -> Findings:
    path, findings = folder / "train.py", Findings()
    path.write_text(text)
    with ScriptHost([str(path)]) as host:
        judge_settings(host, [str(path)], 2, more, findings, updates=4)
    return findings


def test_a_correct_script_is_silent(tmp_path: Path) -> None:
    """The same samples, noise and dropout masks, in other batches."""
    findings = found_in(tmp_path, SCRIPT, ["--accum", "1", "--batch", "8"])
    assert (list(findings), findings.unchecked) == ([], [])


@pytest.mark.integration
@pytest.mark.parametrize("rule", WRONG)
def test_what_differs_is_named(tmp_path: Path, rule: str) -> None:
    findings = found_in(tmp_path, SCRIPT.replace(*WRONG[rule]), ["--accum", "1", "--batch", "8"])
    assert [finding.rule for finding in findings] == [rule], findings.unchecked


@pytest.mark.integration
def test_settings_that_are_another_training_are_not_compared(tmp_path: Path) -> None:
    """More samples in an update."""
    findings = found_in(tmp_path, SCRIPT, ["--batch", "8"])
    assert list(findings) == []
    assert "reads 8 samples on a rank, and 16 with these settings" in findings.unchecked[0]
