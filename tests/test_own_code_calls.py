"""Own parallel code at the command line: what one may type, what is said of a mistake, and that it trains."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from everyrank import ParallelContract, parse_layout
from everyrank.errors import LayoutError
from processes import Cli, one_line

FILE = """\
import time

import torch
from torch.nn.parallel import DistributedDataParallel

from everyrank import ParallelContract


def parallelize(model, mesh):
    return DistributedDataParallel(model, process_group=mesh["data"].get_group())


def forgets(model, mesh):
    DistributedDataParallel(model, process_group=mesh["data"].get_group())


def raises(model, mesh):
    model.layers[0].missing  # line 18


def hangs(model, mesh):
    time.sleep(1000)  # line 22


def halves(model, mesh):
    rank = mesh.get_local_rank("tensor")
    model.weight = torch.nn.Parameter(model.weight[rank : rank + 1].detach().clone())
    return model


def declared(model, mesh):
    return model


def wrongly(model, mesh):
    return model


declared.contract = ParallelContract(axes={"dp": "batch", "tp": "same"})
wrongly.contract = {"dp": "batch"}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("def parallelize(model, mesh)\n    return model\n")
    return tmp_path


WRONG = {
    "absent.py:tensor=2": "layout 'absent.py:tensor=2': there is no file ",
    "broken.py": "broken.py:1: SyntaxError: expected ':'",
    "mine.py:other": "layout mine.py:other: mine.py has no function other; it has parallelize, forgets, raises",
    "mine.py:forgets": "mine.py:forgets returned NoneType, not an nn.Module: end it with `return model`",
    "mine.py:raises": "mine.py:18 in raises: AttributeError: ",
    "mine.py:rows=2": "layout mine.py: the contract has no mesh axis rows; declare what its ranks read: ",
    "mine.py:declared:cp=2": "layout mine.py:declared: the contract has no mesh axis cp; it has dp, tp",
    "mine.py:declared": "layout mine.py:declared: dp and tp have no size; give all but one, for example tp=1",
    "mine.py:tensor=3": "tensor 3 = 3, but there are 2 processes; give --processes 3, or a multiple of it",
    "mine.py:declared:dp=1,tp=1": "dp 1 x tp 1 = 1, but there are 2 processes; give --processes 1",
    "mine.py:data=x": "layout 'mine.py:data=x': data=x: give a whole number",
    "mine.py:data=2,compile": "leave out compile",
    "mine.py:data=2,precision=bf16": "leave out precision=bf16",
    "mine.py:wrongly": "mine.py:wrongly: its contract is dict; give an everyrank.ParallelContract",
}


@pytest.mark.parametrize("layout", WRONG)
def test_wrong_calls(cli: Cli, folder: Path, layout: str) -> None:
    """One line, with what to do about it, and exit status 2."""
    done = cli(folder, "verify", "digits", "--quick", "--layout", layout, "--processes", 2)
    assert done.status == 2, done.err
    lines = [line for line in done.err.splitlines() if not line.startswith("full traceback: ")]
    assert WRONG[layout] in one_line("\n".join(lines))


@pytest.mark.integration
def test_a_function_that_hangs(cli: Cli, folder: Path) -> None:
    """The timeout ends it, and the line where it stands is said."""
    done = cli(folder, "verify", "digits", "--quick", "--layout", "mine.py:hangs", "--processes", 2, "--timeout", 10)
    assert done.status == 2
    assert "after 9 s (--timeout 10) at line 22" in done.err


def test_it_trains_and_goes_on_under_others(cli: Cli, folder: Path) -> None:
    """A checkpoint of it has the model's own names: ddp goes on from it, and it from ddp's."""
    (folder / "tiny.py").write_text(TINY)
    train = ("train", "tiny.py", "--processes", 2, "--save-every", 2)
    for steps, layout, more in ((2, "mine.py", ()), (4, "ddp", ("--resume",)), (6, "mine.py:data=2", ("--resume",))):
        done = cli(folder, *train, "--steps", steps, "--layout", layout, "--out", "run", *more)
        assert done.status == 0, done.err
    losses = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    done = cli(folder, *train, "--steps", 6, "--layout", "ddp", "--out", "other")
    assert done.status == 0, done.err
    others = [json.loads(line) for line in (folder / "other" / "log.jsonl").read_text().splitlines()]
    pairs = [(own["loss"], other["loss"]) for own, other in zip(losses, others, strict=True) if "loss" in own]
    assert len(pairs) == 6
    for own, other in pairs:
        assert own == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize(
    "text", ["mine.py", "mine.py:declared", "mine.py:tp=2,dp=4", "mine.py:declared:tp=2,accumulate=3"]
)
def test_a_layout_is_printed_as_it_was_typed(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A Record names its layout by this text."""
    monkeypatch.chdir(folder)
    assert str(parse_layout(text)) == text
    assert parse_layout(str(parse_layout(text))) == parse_layout(text)


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ({"axes": {"tp": "same", "dp": "batch"}}, "the axes of batch first"),
        ({"axes": {"dp": "samples"}}, "axes={'dp': 'samples'}: give one of batch"),
        ({"gradients": "average"}, "gradients='average': give mean or sum"),
        ({"axes": {"dp": "batch"}, "gradients": {"tp": "sum"}}, "gradients of tp: no such axis"),
    ],
)
def test_wrong_contracts(said: dict[str, Any], line: str) -> None:
    """Refused where they are made: with the file's own line, in a rank."""
    with pytest.raises(LayoutError) as raised:
        ParallelContract(**said)
    assert line in str(raised.value)


def test_no_checkpoint_of_unknown_parts(cli: Cli, folder: Path) -> None:
    """A rank's own part, which no DTensor tells of, would be saved as if it were the whole."""
    (folder / "tiny.py").write_text(TINY)
    done = cli(folder, "train", "tiny.py", "--processes", 2, "--layout", "mine.py:halves:tensor=2,data=1")
    assert done.status == 2
    assert "it cannot be saved" in one_line(done.err)


def test_bench_takes_it(cli: Cli, folder: Path) -> None:
    """Checked and timed as any layout."""
    (folder / "tiny.py").write_text(TINY)
    done = cli(
        folder, "bench", "tiny.py", "--layout", "mine.py", "--processes", 2, "--trials", 1, "--steps", 2, "--json", "r"
    )
    assert done.status == 0, done.err
    [record] = json.loads((folder / "r").read_text())
    assert (record["layout"], record["parity"]["status"]) == ("mine.py", "equal")
    assert record["throughput_samples_per_second"]["median"] > 0


TINY = textwrap.dedent("""\
    import torch
    from torch.utils.data import TensorDataset

    from everyrank import Workload

    workload = Workload(
        name="tiny",
        model=lambda: torch.nn.Linear(3, 2),
        train_data=lambda: TensorDataset(torch.randn(24, 3), torch.randn(24, 2)),
        loss=lambda output, target: ((output - target).square().sum(), target.numel()),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        global_batch=8,
    )
    """)
