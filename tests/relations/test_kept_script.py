"""`everyrank audit --save` and `--against` compare a script with a saved trace of an earlier version."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from everyrank.cli import main
from everyrank.errors import CannotRunError, UsageError
from everyrank.parity.kept import compare_kept
from everyrank.relations.kept_script import trace_in_host
from everyrank.rerun import RankRecording, RecordedUpdate, ScriptHost, ScriptRecording

TRAINING = """
import time
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(96, 6)
data = TensorDataset(x, x[:, :3].argmax(1))
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb in DataLoader(data, batch_size=8, sampler=sampler):
        loss = F.cross_entropy(net(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.6f}, {time.time()} s")
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptHost]:
    """Yield a script host that has imported the training script."""
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(TRAINING)
    with ScriptHost([str(path)]) as script_host:
        yield script_host


def trace_changed_script(host: ScriptHost, folder: Path, old: str = "", new: str = "") -> dict[str, Any]:
    """Return the trace of the training script after `old` is replaced by `new`."""
    assert old in TRAINING
    (folder / "train.py").write_text(TRAINING.replace(old, new) if old else TRAINING)
    return trace_in_host(host, [str(folder / "train.py")], 2, 8)


@pytest.fixture(scope="module")
def saved_trace(host: ScriptHost, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the trace of the unchanged script, as it is read from a saved file."""
    trace = trace_changed_script(host, tmp_path_factory.mktemp("before"))
    return json.loads(json.dumps(trace))


@pytest.mark.parametrize(
    ("old", "new", "status", "phrase"),
    [
        ("yb)\n", "yb) / 2\n", "different", "a scale in the loss"),
        ("import time", "import time, torch; torch.set_num_threads(2)", "equal", "rounding allows"),
        ("net(xb), yb", "net(xb.flip(0)), yb.flip(0)", "equal", "rounding allows"),
        ("manual_seed(0)", "manual_seed(1)", "not comparable", "not the same experiment: training data"),
        ("loss.backward()", "(loss / 2).backward()", "different", "0.5 times"),
        ("lr=0.01", "lr=0.02", "different", "the learning rate has changed"),
        ("loss.item()", "loss.item() * 2", "different", "number 2 of"),
    ],
)
def test_script_change_is_classified_against_saved_trace(
    host: ScriptHost, saved_trace: dict[str, Any], tmp_path: Path, old: str, new: str, status: str, phrase: str
) -> None:
    """A change of the mathematics is reported. A change within rounding error is equal."""
    result = compare_kept(saved_trace, trace_changed_script(host, tmp_path, old, new))
    assert (result.status, phrase in " ".join(result.lines())) == (status, True), result.lines()


def test_printed_times_are_not_saved(saved_trace: dict[str, Any]) -> None:
    """A printed number that differs between two runs of the same script is not saved."""
    assert [value for value, _ in saved_trace["evaluation"].values() if value > 1e6] == []
    assert any("epoch # loss #" in name for name in saved_trace["evaluation"])


def test_script_that_is_not_reproducible_is_refused(host: ScriptHost, tmp_path: Path) -> None:
    """A script whose two runs differ cannot be saved."""
    with pytest.raises(UsageError, match=r"two runs .* differ: the loss of update 0"):
        trace_changed_script(host, tmp_path, "manual_seed(0)", "manual_seed(time.time_ns())")


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ([[1.0, math.nan], [1.0, math.nan]], "the loss of update 1 is NaN"),
        ([[1.0], []], "rank 1 has not made an optimizer step"),
        ([[], []], "no rank has made an optimizer step"),
    ],
)
def test_script_without_comparable_losses_is_refused(losses: list[list[float]], message: str) -> None:
    """Two losses of NaN are no sign of random numbers without a seed."""
    tensors = [{"weight": torch.ones(2)} for _ in range(3)]
    ranks = [
        RankRecording(
            [RecordedUpdate([loss], [], "train.py:30", *tensors, [0.1], 1, {}) for loss in losses_of_rank],
            *([], "", {}, {}, [], [], {}),
        )
        for losses_of_rank in losses
    ]
    recording = ScriptRecording(tuple(ranks), "", "", 0.0, Path(), float64=True)
    host: Any = SimpleNamespace(run_in_float64=lambda *_, **__: recording)
    with pytest.raises(CannotRunError, match=message):
        trace_in_host(host, [__file__], 2, 8)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--against", "missing.json", "train.py"], "missing.json: No such file"),
        (["--against", "wrong.json", "train.py"], "wrong.json: "),
        (["--save", "kept.json", "--replay", "train.py"], "--replay"),
        (["--save", "kept.json", "--fix", "train.py"], "--fix"),
        (["--save", "kept.json", "--same", "--lr 1", "train.py"], "--same"),
        (["--save", "kept.json", "--resume-with", "--resume", "train.py"], "--resume-with"),
        (["--same", "'a", "--same", "b", "train.py"], '--same "\'a"'),
        (["--save", "kept.json", "missing.py"], "missing.py"),
    ],
)
def test_invalid_arguments_are_refused(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    message: str,
) -> None:
    """The error is one line and the exit code is 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "wrong.json").write_text("{}")
    assert main(["audit", *args]) == 2
    error_output = capsys.readouterr().err
    assert message in error_output
    assert len(error_output.splitlines()) == 1


@pytest.mark.integration
def test_audit_command_saves_and_compares(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--against` takes the number of ranks from the saved file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINING)
    assert main(["audit", "--processes", "1", "--updates", "4", "--save", "kept.json", "train.py"]) == 0
    (tmp_path / "train.py").write_text(TRAINING.replace("yb)\n", "yb) * 3\n"))
    assert main(["audit", "--updates", "4", "--against", "kept.json", "train.py"]) == 1
    assert "the loss is 3 times" in capsys.readouterr().out
