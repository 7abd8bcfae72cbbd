"""Custom parallelize functions on the command line: layout strings, errors, training, checkpoints and bench."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from everyrank import ParallelContract, parse_layout
from everyrank.errors import LayoutError
from processes import Cli, only_error_line

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
    """A folder with mine.py, which has parallelize functions, and broken.py, which has a syntax error."""
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("def parallelize(model, mesh)\n    return model\n")
    return tmp_path


EXPECTED_ERRORS = {
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


@pytest.mark.parametrize("layout", EXPECTED_ERRORS)
def test_invalid_layout_is_refused_in_one_line(cli: Cli, folder: Path, layout: str) -> None:
    """verify prints one line and exits with status 2."""
    result = cli(folder, "verify", "digits", "--quick", "--layout", layout, "--processes", 2)
    assert result.status == 2, result.err
    lines = [line for line in result.err.splitlines() if not line.startswith("full traceback: ")]
    assert EXPECTED_ERRORS[layout] in only_error_line("\n".join(lines))


@pytest.mark.integration
def test_function_that_hangs_is_stopped_after_the_timeout(cli: Cli, folder: Path) -> None:
    """The error names the line at which the function hangs."""
    result = cli(folder, "verify", "digits", "--quick", "--layout", "mine.py:hangs", "--processes", 2, "--timeout", 10)
    assert result.status == 2
    assert "after 9 s (--timeout 10) at line 22" in result.err


def test_training_resumes_between_a_custom_function_and_ddp(cli: Cli, folder: Path) -> None:
    """Checkpoints have the parameter names of the model, so each layout can resume from the other."""
    (folder / "tiny.py").write_text(TINY)
    train_args = ("train", "tiny.py", "--processes", 2, "--save-every", 2)
    for steps, layout, resume_args in (
        (2, "mine.py", ()),
        (4, "ddp", ("--resume",)),
        (6, "mine.py:data=2", ("--resume",)),
    ):
        result = cli(folder, *train_args, "--steps", steps, "--layout", layout, "--out", "run", *resume_args)
        assert result.status == 0, result.err
    rows = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    result = cli(folder, *train_args, "--steps", 6, "--layout", "ddp", "--out", "other")
    assert result.status == 0, result.err
    ddp_rows = [json.loads(line) for line in (folder / "other" / "log.jsonl").read_text().splitlines()]
    losses = [(row["loss"], ddp_row["loss"]) for row, ddp_row in zip(rows, ddp_rows, strict=True) if "loss" in row]
    assert len(losses) == 6
    for loss, ddp_loss in losses:
        assert loss == pytest.approx(ddp_loss, rel=1e-5)


@pytest.mark.parametrize(
    "text", ["mine.py", "mine.py:declared", "mine.py:tp=2,dp=4", "mine.py:declared:tp=2,accumulate=3"]
)
def test_layout_with_a_custom_function_is_printed_as_it_was_typed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """A Record names its layout by this text, so it must parse to the same layout."""
    monkeypatch.chdir(folder)
    assert str(parse_layout(text)) == text
    assert parse_layout(str(parse_layout(text))) == parse_layout(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axes": {"tp": "same", "dp": "batch"}}, "the axes of batch first"),
        ({"axes": {"dp": "samples"}}, "axes={'dp': 'samples'}: give one of batch"),
        ({"gradients": "average"}, "gradients='average': give mean or sum"),
        ({"axes": {"dp": "batch"}, "gradients": {"tp": "sum"}}, "gradients of tp: no such axis"),
        ({"gradients": {"contxt": "sum"}}, "gradients of contxt: no such axis; it has data, dp,"),
    ],
)
def test_invalid_contract_is_refused(arguments: dict[str, Any], message: str) -> None:
    """`ParallelContract` raises the error, so the traceback has the line of the user's file."""
    with pytest.raises(LayoutError) as raised:
        ParallelContract(**arguments)
    assert message in str(raised.value)


def test_training_with_shards_that_are_not_dtensors_is_refused(cli: Cli, folder: Path) -> None:
    """Without a DTensor, the checkpoint would have the shard of one rank as if it were the whole parameter."""
    (folder / "tiny.py").write_text(TINY)
    result = cli(folder, "train", "tiny.py", "--processes", 2, "--layout", "mine.py:halves:tensor=2,data=1")
    assert result.status == 2
    assert "it cannot be saved" in only_error_line(result.err)


def test_bench_with_a_custom_function(cli: Cli, folder: Path) -> None:
    """bench checks and times it like any layout."""
    (folder / "tiny.py").write_text(TINY)
    result = cli(
        folder, "bench", "tiny.py", "--layout", "mine.py", "--processes", 2, "--trials", 1, "--steps", 2, "--json", "r"
    )
    assert result.status == 0, result.err
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
