"""`verify --save`, `--against` and `--between` compare two versions of a workload, as files or commits."""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from everyrank.commands.versions import arguments_in_worktree
from everyrank.parity.kept import compare_kept, elements
from processes import Cli, only_error_line, refusal_message

WORKLOAD = '''
import torch
from torch import nn

from everyrank import Workload

SEED, THREADS, SCALE, GRADIENT, RATE = 0, 0, 1.0, 1.0, 0.1


class Summed(nn.Module):
    """A linear layer whose sum may be taken in pieces."""

    def __init__(self, pieces):
        super().__init__()
        self.weight, self.pieces = nn.Parameter(torch.randn(4, 32) * 0.1), pieces

    def forward(self, value):
        parts = zip(value.chunk(self.pieces, 1), self.weight.chunk(self.pieces, 1))
        return sum(part @ weight.T for part, weight in parts)


def data():
    values = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    return [(value, value[:4].sign()) for value in values]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * GRADIENT


def loss(output, target):
    return (Scaled.apply(output) - target).square().sum() * SCALE, target.numel()


def workload():
    if THREADS:
        torch.set_num_threads(THREADS)
    return Workload(
        name="summed",
        model=lambda: Summed(PIECES),
        train_data=data,
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9),
        global_batch=16,
        epochs=3,
        seed=SEED,
    )
'''.replace("RATE = 0, 0, 1.0, 1.0, 0.1", "RATE, PIECES = 0, 0, 1.0, 1.0, 0.1, 1")


def script_with(**constants: float) -> str:
    """Return the workload script with these constants."""
    names = ["SEED", "THREADS", "SCALE", "GRADIENT", "RATE", "PIECES"]
    values: list[float] = [0, 0, 1.0, 1.0, 0.1, 1]
    for name, value in constants.items():
        values[names.index(name)] = value
    constants_line = f"{', '.join(names)} = {', '.join(map(str, values))}"
    return "\n".join(constants_line if line.startswith("SEED, ") else line for line in WORKLOAD.splitlines())


@pytest.fixture
def saved(cli: Cli, tmp_path: Path) -> Path:
    """The file before.json that `verify --save` wrote for summed.py."""
    (tmp_path / "summed.py").write_text(WORKLOAD)
    result = cli(tmp_path, "verify", "summed.py", "--save", "before.json")
    assert result.status == 0, result.err
    assert result.out == "wrote before.json: 12 updates of summed\n"
    return tmp_path / "before.json"


CHANGES = [
    ({}, 0, "equal: 12 losses differ by at most 0.0e+00", ""),
    ({"PIECES": 4}, 0, "equal: 12 losses differ by at most ", ""),  # reordered sums
    ({"THREADS": 2}, 0, "equal: 12 losses differ by at most ", ""),
    (
        {"SCALE": 0.5},
        1,
        "different: the loss of update 0 is ",
        "the loss is 0.5 times what it was: a scale in the loss",
    ),
    ({"GRADIENT": 2.0}, 1, "different: the loss of update 1 is ", "the gradients are 2 times what they were"),
    ({"RATE": 0.05}, 1, "different: the loss of update 1 is ", "the optimizer or the learning rate has changed"),
    ({"SEED": 1}, 1, "not comparable: not the same experiment: seed: 0 before, 1 now", ""),
]


@pytest.mark.integration
def test_each_change_has_its_status_and_cause(saved: Path, cli: Cli) -> None:
    """A change causes only rounding differences, a difference with its cause, or a different experiment."""
    for index, (constants, expected_status, expected_line, expected_cause) in enumerate(CHANGES):
        script = saved.parent / "summed.py"
        script.write_text(script_with(**constants))
        # Python recompiles a file only if its modification time in seconds or its size changed
        os.utime(script, (index, index))
        result = cli(saved.parent, "verify", "summed.py", "--against", "before.json")
        printed = " ".join(result.out.split())
        assert (result.status, expected_line in printed, expected_cause in printed) == (expected_status, True, True), (
            constants,
            result,
        )


def test_between_compares_two_commits(cli: Cli, tmp_path: Path) -> None:
    """Each commit has a temporary worktree, which is removed. The user's files do not change."""

    def git(*args: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.run(
            ["git", *identity, *args], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "--quiet", "-b", "main")
    for constants in ({}, {"SCALE": 3.0}):
        (tmp_path / "summed.py").write_text(script_with(**constants))
        git("add", "summed.py")
        git("commit", "--quiet", "-m", str(constants))
    (tmp_path / "summed.py").write_text("not committed, and no Python")
    result = cli(tmp_path, "verify", "./summed.py", "--between", "HEAD~1", "HEAD")
    assert result.status == 1, result.err
    assert "the loss is 3 times" in " ".join(result.out.split())
    assert len(git("worktree", "list").splitlines()) == 1
    assert (tmp_path / "summed.py").read_text() == "not committed, and no Python"
    unknown = cli(tmp_path, "verify", "summed.py", "--between", "HEAD", "nope")
    assert unknown.status == 2
    assert only_error_line(unknown.err).startswith("everyrank: --between: nope: ")


def test_arguments_in_a_worktree_name_its_workload_and_the_data_of_the_user(tmp_path: Path) -> None:
    """Data that git does not have are read from the user's folder. Data of the commit are those of the commit."""
    (tmp_path / "tracked").mkdir()
    for data, added in (("untracked", ["--data", str(Path("untracked").absolute())]), ("tracked", [])):
        argv = ["verify", "../w.py:big", "--between", "A", "B", "--data", data]
        args = argparse.Namespace(argv=argv, workload="../w.py:big", data=Path(data))
        arguments = arguments_in_worktree(args, Path("/tree/w.py"), tmp_path)
        assert arguments == ["verify", "/tree/w.py:big", "--data", data, *added]


def test_against_refuses_files_that_save_did_not_write(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these commands is refused with one line. Then the causes of a comparison are checked."""
    monkeypatch.chdir(saved.parent)
    content = json.loads(saved.read_text())
    for wrong_content in ([], {}, {**content, "format": "2"}, {**content, "losses": ["1"]}, {**content, "counts": []}):
        Path("wrong.json").write_text(json.dumps(wrong_content))
        text = refusal_message(capsys, "verify", "digits", "--against", "wrong.json")
        assert "--against wrong.json" in text
    assert "No such file" in refusal_message(capsys, "verify", "digits", "--against", "missing.json")
    assert "leave --layout" in refusal_message(capsys, "verify", "digits", "--save", "a.json", "--layout", "ddp")
    assert "not a file" in refusal_message(capsys, "verify", "digits", "--between", "main", "HEAD")
    _check_comparison_causes(content)


def _check_comparison_causes(content: dict[str, Any]) -> None:
    """Check the other causes with changed numbers in the saved content."""

    def compare_after(change: Callable[[dict[str, Any]], None]) -> str:
        current = copy.deepcopy(content)
        change(current)
        return " ".join(compare_kept(content, current).lines())

    assert "update 3 has 64 loss terms before, 60 now" in compare_after(
        lambda current: current["counts"].__setitem__(3, 60.0)
    )
    assert "a schedule, the order of samples" in compare_after(lambda current: current["losses"].__setitem__(5, 9.0))
    assert "weight differs by" in compare_after(lambda current: current["final"]["weight"].__setitem__(0, 9.0))
    assert "the initial weights are different" in compare_after(
        lambda current: current["initial"]["weight"].__setitem__(0, 9.0)
    )
    assert "training data" in compare_after(lambda current: current["experiment"].__setitem__("training data", "x"))
    assert "tensor bias: None before, [3] now" in compare_after(
        lambda current: current["experiment"]["tensors"].update(bias=[3])
    )
    text = compare_after(lambda current: current["versions"].update(torch="9.9"))
    assert text.startswith("equal: ")
    assert "torch: " in text
    assert "9.9 now" in text


INF, NAN = float("inf"), float("nan")


def kept(**values: Any) -> dict[str, Any]:
    """Return the content of a trace file with three updates."""
    return {
        "versions": {},
        "experiment": {},
        "losses": [1.0, 1.0, 0.9],
        "counts": [4.0, 4.0, 4.0],
        "loss_tolerances": [1e-9] * 3,
        "initial": {},
        "gradients": {"weight": [1.0, 2.0]},
        "final": {},
        "final_tolerances": {"low": INF},
        "evaluation": {},
        **values,
    }


def compared(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the result of a comparison in one line."""
    return " ".join(compare_kept(kept(**before), kept(**now)).lines())


@pytest.mark.parametrize("tensor", ["initial", "final"])
def test_equal_infinite_values_are_no_difference(tensor: str) -> None:
    """The bounds of an observer begin as inf and -inf. An infinite value hides no difference of later elements."""
    same = {tensor: {"low": [INF, -INF, NAN, 1.0]}}
    assert compared(same, same).startswith("equal: ")
    for index, value in ((0, NAN), (0, 2.0), (1, INF), (2, 0.0)):
        values = [INF, -INF, NAN, 1.0]
        values[index] = value
        assert "low " in compared(same, {tensor: {"low": values}})
    assert "by 1.0e+00" in compared({"initial": {"low": [INF, 1.0]}}, {"initial": {"low": [INF, 2.0]}})


def test_metric_that_is_nan_in_both_is_no_difference() -> None:
    same = {"evaluation": {"recall": [NAN, 4.0]}}
    assert compared(same, same).startswith("equal: ")
    assert "recall of the evaluation is nan of 4 before, 1 of 4 now" in compared(
        same, {"evaluation": {"recall": [1.0, 4.0]}}
    )


def test_changed_gradients_are_named_after_an_update_with_rate_0() -> None:
    """A warm-up from 0 leaves the second loss equal, so the first loss that differs is that of update 2."""
    changed = {"losses": [1.0, 1.0, 0.95]}
    assert "the backward pass has changed" in compared({}, {**changed, "gradients": {"weight": [1.0, 1.0]}})
    assert "updates 0 to 1 are equal: a schedule" in compared({}, changed)
    assert "the optimizer or the learning rate has changed" in compared({}, {"losses": [1.0, 0.95, 0.95]})
    without_gradients = compared({"gradients": {}}, {"losses": [1.0, 0.95, 0.95], "gradients": {}})
    assert "the first loss is equal: the optimizer, the learning rate, the samples, or a buffer" in without_gradients


@pytest.mark.parametrize("losses", [[1.0], [0.0, 0.0], [0.0, 1.0, 1.0]])
def test_each_loss_has_one_factor_only_if_there_are_two(losses: list[float]) -> None:
    count = {"counts": [4.0] * len(losses), "loss_tolerances": [1e-9] * len(losses)}
    changed = [1.0123 * loss or 0.5 for loss in losses]
    assert "the same weights give a different loss" in compared(
        {"losses": losses, **count}, {"losses": changed, **count}
    )
    assert "each loss is 1.0123 times" in compared({}, {"losses": [1.0123 * loss for loss in (1.0, 1.0, 0.9)]})


@pytest.mark.parametrize("size", [(50257, 768), (32000, 4096)])
def test_large_tensors_have_elements(size: tuple[int, int]) -> None:
    """float32 rounds the last index of these sizes up."""
    assert elements(torch.zeros((), dtype=torch.uint8).expand(size)) == [0.0] * 64
    assert elements(torch.arange(100))[-1] == 99.0
