"""`everyrank audit --same`: larger batches with fewer accumulation steps are equivalent."""

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


def compare_settings(folder: Path, script: str, other_args: list[str]) -> Findings:
    """Return the differences between two runs of this script, one of them with `other_args`."""
    path, findings = folder / "train.py", Findings()
    path.write_text(script)
    with ScriptHost([str(path)]) as host:
        judge_settings(host, [str(path)], 2, other_args, findings, updates=4)
    return findings


def test_equivalent_settings_have_no_findings(tmp_path: Path) -> None:
    """The samples, the noise and the dropout masks are the same, in batches of another size."""
    findings = compare_settings(tmp_path, SCRIPT, ["--accum", "1", "--batch", "8"])
    assert (list(findings), findings.unchecked) == ([], [])


@pytest.mark.integration
@pytest.mark.parametrize("rule", WRONG)
def test_difference_between_settings_is_reported(tmp_path: Path, rule: str) -> None:
    """The mistakes are in the gradient, the learning rate and the parameters."""
    findings = compare_settings(tmp_path, SCRIPT.replace(*WRONG[rule]), ["--accum", "1", "--batch", "8"])
    assert [finding.rule for finding in findings] == [rule], findings.unchecked


@pytest.mark.integration
def test_settings_that_are_not_equivalent_are_not_compared(tmp_path: Path) -> None:
    """The other settings read more samples per update."""
    findings = compare_settings(tmp_path, SCRIPT, ["--batch", "8"])
    assert list(findings) == []
    assert "reads 8 samples on a rank, and 16 with these settings" in findings.unchecked[0]
