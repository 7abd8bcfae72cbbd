"""`verify --save`, `--against` and `--between` compare two versions of a workload, as files or commits."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everyrank.parity.kept import compare_kept
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
    result = cli(tmp_path, "verify", "summed.py", "--between", "HEAD~1", "HEAD")
    assert result.status == 1, result.err
    assert "the loss is 3 times" in " ".join(result.out.split())
    assert len(git("worktree", "list").splitlines()) == 1
    assert (tmp_path / "summed.py").read_text() == "not committed, and no Python"
    unknown = cli(tmp_path, "verify", "summed.py", "--between", "HEAD", "nope")
    assert unknown.status == 2
    assert only_error_line(unknown.err).startswith("everyrank: --between: nope: ")


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
