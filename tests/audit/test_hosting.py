"""How an audit runs a script: number of ranks, fake CUDA, crashes, and which values count as samples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from auditing import line_numbers_with
from processes import Cli

TRAIN = """
import os, sys
import torch
from torch import nn
HEAD
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    LATER
"""
GUARDED = """
import os
import torch.distributed as dist
def init():
    if "RANK" not in os.environ:
        return print("not distributed")
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
import torch
"""


def script(head: str = "", later: str = "pass") -> str:
    """Return the training script with this code at its start and in its loop."""
    return TRAIN.replace("HEAD", head).replace("LATER", later)


def ranks_of(stdout: str) -> int:
    """Return the number of ranks in the summary."""
    match = re.search(r"updates on (\d+) rank", stdout)
    assert match is not None, stdout
    return int(match[1])


DISTRIBUTED_IMPORTS = {
    "a package": "from util.misc import init; init()",
    "a relative import": "from util import init; init()",
    "a name made at run time": "import importlib; importlib.import_module('ut' + 'il.misc').init()",
}


@pytest.mark.parametrize("kind", DISTRIBUTED_IMPORTS)
def test_distributed_script_runs_on_two_ranks(kind: str, cli: Cli, tmp_path: Path) -> None:
    """torch.distributed is used next to the script, in a package, or in a module that only a run imports."""
    (tmp_path / "util").mkdir()
    (tmp_path / "util" / "__init__.py").write_text("from .misc import init\n" if "relative" in kind else "")
    (tmp_path / "util" / "misc.py").write_text(GUARDED)
    (tmp_path / "train.py").write_text(script(DISTRIBUTED_IMPORTS[kind]))
    result = cli(tmp_path, "audit", "train.py")
    assert ranks_of(result.out) == 2, result.err


def test_distributed_script_on_one_rank_gets_a_hint(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script("import torch.distributed"))
    result = cli(tmp_path, "audit", "--processes", "1", "train.py")
    assert ranks_of(result.out) == 1
    assert "nothing wrong found" not in result.out
    assert "--processes 2" in result.out.splitlines()[-1]


CUDA_SCRIPTS = {
    "a module": (["-m", "pkg.train"], "device = 'cuda'"),
    "found at run time": (["pkg/train.py"], "device = 'cu' + 'da'"),
    "asked for": (["--pretend-cuda", "pkg/train.py"], "device = 'cu' + 'da'"),
}


@pytest.mark.parametrize("kind", CUDA_SCRIPTS)
def test_cuda_calls_run_on_the_cpu(kind: str, cli: Cli, tmp_path: Path) -> None:
    """Generators, streams and events are replaced too."""
    args, head = CUDA_SCRIPTS[kind]
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    head += """
generator = torch.Generator(device=device)
generator.manual_seed(1)
torch.randn(3, device=device, generator=generator)
with getattr(torch, device).stream(getattr(torch, device).Stream()):
    event = getattr(torch, device).Event(enable_timing=True)
    event.record()
assert isinstance(generator, torch.Generator)
"""
    (tmp_path / "pkg" / "train.py").write_text(script(head))
    result = cli(tmp_path, "audit", *args)
    assert result.status == 0, result.err
    assert "CUDA calls ran on the CPU" in result.out


def test_crash_shows_traceback_and_earlier_findings(cli: Cli, tmp_path: Path) -> None:
    """The output has the last frames, the path of a log file, and findings of the updates before."""
    text = script(later="if step == 4: print('last words'); raise ValueError('boom')").replace(
        "optimizer.zero_grad()", "pass"
    )
    (tmp_path / "train.py").write_text(text)
    result = cli(tmp_path, "audit", "train.py")
    assert result.status == 4
    assert "gradient.carried" in result.out
    [line] = list(line_numbers_with(text, "boom"))
    assert f'train.py", line {line}, in <module>' in result.err
    assert result.err.splitlines()[-1].endswith(f"rank 0: train.py:{line} in <module>: ValueError: boom")
    log = re.search(r"full traceback: (\S+)", result.err)
    assert log is not None
    assert "last words" in Path(log[1]).read_text()


LOSS_IN_MODEL = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x, mask):
        loss = (self.layer(x) - x).square().mean(-1)
        LOSS
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Masked())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(6):
    optimizer.zero_grad()
    for micro in range(2):
        mask = torch.zeros(8)
        mask[:NUM] = 1.0
        loss, _ = model(torch.randn(8, 4), mask)
        (loss / DIVISOR).backward()
    optimizer.step()
dist.destroy_process_group()
"""
LOSSES = {
    "a sum over the sum of its mask": "return (loss * mask).sum() / mask.sum(), loss",
    "a mean": "return loss.mean(), loss",
}


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(("divisor", "num", "rule"), [("2", "5", ""), ("1", "5", "gradient.scale")])
def test_loss_returned_by_the_model(kind: str, divisor: str, num: str, rule: str, cli: Cli, tmp_path: Path) -> None:
    """The loss is accumulated over two backwards, and divided by two or not."""
    text = LOSS_IN_MODEL.replace("LOSS", LOSSES[kind]).replace("DIVISOR", divisor).replace("NUM", num)
    (tmp_path / "train.py").write_text(text)
    result = cli(tmp_path, "audit", "train.py")
    assert result.status == (1 if rule else 0), result.out + result.err
    assert rule in result.out
    assert "the weight of loss terms" not in result.out


def test_micro_batches_with_masks_of_different_sizes_are_reported(cli: Cli, tmp_path: Path) -> None:
    text = LOSS_IN_MODEL.replace("LOSS", LOSSES["a sum over the sum of its mask"]).replace("DIVISOR", "2")
    (tmp_path / "train.py").write_text(text.replace("NUM", "3 + 2 * micro"))
    result = cli(tmp_path, "audit", "train.py")
    assert "gradient.ragged" in result.out, result.out + result.err


LOCAL_DATA = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __init__(self, x):
        self.x = x
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        return self.x[index] NOISE
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(96, 4)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = Data(x[dist.get_rank() :: dist.get_world_size()])
for epoch in range(2):
    for batch in DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("noise", ["", "+ 0.1 * torch.randn(4)"], ids=["plain", "augmented"])
def test_ranks_with_local_datasets_have_no_data_finding(noise: str, cli: Cli, tmp_path: Path) -> None:
    """Equal indices in different datasets are not equal samples."""
    (tmp_path / "train.py").write_text(LOCAL_DATA.replace("NOISE", noise))
    result = cli(tmp_path, "audit", "train.py")
    assert "data." not in result.out, result.out


def test_shim_is_imported_before_the_script(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim" / "sitecustomize.py").write_text("import numpy\nnumpy.float = float\n")
    (tmp_path / "shim" / "old_package.py").write_text("name = 'old'\n")
    (tmp_path / "train.py").write_text(script("import numpy, old_package\nassert numpy.float is float"))
    assert cli(tmp_path, "audit", "--shim", "shim", "train.py").status == 0
    result = cli(tmp_path, "audit", "--shim", "absent", "train.py")
    assert result.status == 2
    assert "--shim absent" in result.err


def test_warning_is_not_reported_as_nothing_wrong(cli: Cli, tmp_path: Path) -> None:
    text = LOCAL_DATA.replace("NOISE", "").replace("for epoch", "loader = DataLoader(data, batch_size=8)\nfor epoch")
    text = text.replace("in DataLoader(data, batch_size=8, shuffle=True)", "in loader")
    (tmp_path / "train.py").write_text(text)
    result = cli(tmp_path, "audit", "train.py")
    assert "WARN" in result.out
    assert "nothing wrong found" not in result.out


LINE_SEARCH = """
import torch
from torch import distributed as dist, nn
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
x = torch.randn(16, 4)[dist.get_rank() :: 2]
def closure():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss
for step in range(4):
    optimizer.step(closure)
"""


def test_line_search_of_lbfgs_has_no_finding(cli: Cli, tmp_path: Path) -> None:
    """LBFGS calls its closure several times in a step, each time with zeroed gradients, and needs all all-reduces."""
    (tmp_path / "train.py").write_text(LINE_SEARCH)
    result = cli(tmp_path, "audit", "train.py")
    assert result.status == 0, result.err
    assert "WARN" not in result.out
    assert "PERF" not in result.out
