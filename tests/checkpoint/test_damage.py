"""Resume refuses damaged checkpoints, foreign files and different workloads with a one-line error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import zoo
from checkpointing import (
    DIGITS_ARGS,
    MixedModel,
    TrainingSession,
    change_metadata,
    mixed_workload,
    resume_digits,
    save_with_scores,
    step_folder,
    train_and_save,
)
from everyrank.checkpoint import resume
from everyrank.cli import main
from everyrank.errors import UsageError
from everyrank.runs import checkpoint_named, find_checkpoint, newest_whole, set_aside_newer
from everyrank.world import World
from processes import Cli, only_error_line, refusal_message

# --- damaged checkpoints and foreign files


def cut_tensors(folder: Path) -> None:
    """Truncate the tensor file of rank 1."""
    path = folder / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])


def lose_tensors(folder: Path) -> None:
    """Delete the tensor file of rank 0."""
    (folder / "__0_0.distcp").unlink()


def lose_values(folder: Path) -> None:
    """Delete the values that are not tensors."""
    (folder / "training.pt").unlink()


def lose_table(folder: Path) -> None:
    """Delete the table of contents."""
    (folder / ".metadata").unlink()


def cut_about(folder: Path) -> None:
    """Truncate the metadata."""
    path = folder / "about.json"
    path.write_bytes(path.read_bytes()[:200])


def empty_about(folder: Path) -> None:
    (folder / "about.json").write_bytes(b"")


def list_about(folder: Path) -> None:
    (folder / "about.json").write_text("[1, 2]")


def binary_about(folder: Path) -> None:
    (folder / "about.json").write_bytes(bytes(range(128, 256)))


def deep_about(folder: Path) -> None:
    (folder / "about.json").write_text("[" * 100_000)


def set_metadata(**changes: Any) -> Callable[[Path], None]:
    """Return a function that replaces values of a checkpoint's metadata."""

    def change(folder: Path) -> None:
        change_metadata(folder, **changes)

    change.__name__ = repr(changes)[:60]
    return change


REMOVED_OR_TRUNCATED_FILES = [cut_tensors, lose_tensors, lose_values, lose_table]

INVALID_METADATA_FILES = [cut_about, empty_about, list_about, binary_about, deep_about]

WRONG_METADATA_VALUES = [
    set_metadata(step="6"),
    set_metadata(step=-1),
    set_metadata(step=None),
    set_metadata(metrics=[0.5]),
    set_metadata(metrics={"top1": "high"}),
    set_metadata(best_by=["top1"]),
    set_metadata(files=[1]),
    set_metadata(files={"training.pt": 3}),
    set_metadata(files={"../training.pt": [3, 4]}),
    set_metadata(settings=3),
    set_metadata(aliases=3),
    set_metadata(files={"training.pt": [math.inf, 4]}),
    set_metadata(metrics={"top1": 10**400}),
    set_metadata(updates_per_epoch=10**400),
    set_metadata(updates_per_epoch="x"),
]


@pytest.mark.parametrize(
    "corrupt",
    [*REMOVED_OR_TRUNCATED_FILES, *INVALID_METADATA_FILES, *WRONG_METADATA_VALUES],
    ids=lambda corrupt: corrupt.__name__,
)
def test_resume_refuses_a_damaged_checkpoint_and_suggests_the_last_intact_one(
    run_folder: Path, corrupt: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """The result is the same whether the argument is the run or the checkpoint: status 2 and one line."""
    corrupt(step_folder(run_folder, 6))
    for argument in ((), (step_folder(run_folder, 6),)):
        line = refusal_message(capsys, *DIGITS_ARGS, "--out", run_folder, "--resume", *argument)
        assert str(step_folder(run_folder, 6)) in line
        assert f"--resume {step_folder(run_folder, 4)}" in line


@pytest.mark.parametrize("corrupt", [cut_tensors, cut_about], ids=lambda corrupt: corrupt.__name__)
def test_automatic_resume_takes_the_newest_intact_checkpoint(run_folder: Path, corrupt: Callable[[Path], None]) -> None:
    """`newest_whole` skips checkpoints with missing or truncated files, because no user can read a suggestion."""
    checkpoint = newest_whole(run_folder)
    assert checkpoint is not None
    assert checkpoint.path == step_folder(run_folder, 6)
    for step_number in (6, 4):
        corrupt(step_folder(run_folder, step_number))
    checkpoint = newest_whole(run_folder)
    assert checkpoint is not None
    assert checkpoint.path == step_folder(run_folder, 2)
    corrupt(step_folder(run_folder, 2))
    assert newest_whole(run_folder) is None


@pytest.mark.parametrize("corrupt", [cut_tensors, cut_about], ids=lambda corrupt: corrupt.__name__)
def test_resume_suggests_nothing_if_all_checkpoints_are_damaged(
    run_folder: Path, corrupt: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    for step_number in (2, 4, 6):
        corrupt(step_folder(run_folder, step_number))
    for argument in ((), (step_folder(run_folder, 6),), (run_folder,)):
        line = refusal_message(capsys, *DIGITS_ARGS, "--out", run_folder, "--resume", *argument)
        assert "--resume" not in line
        assert str(run_folder) in line


@pytest.mark.parametrize(
    ("path", "message"), [(".", "no complete checkpoint"), ("./", "no complete checkpoint"), ("", "is not a folder")]
)
def test_resume_from_the_current_folder_does_not_start_from_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: str, message: str
) -> None:
    """`--resume .` names a folder. Only `--resume` without a value may start from scratch."""
    monkeypatch.chdir(tmp_path)
    line = refusal_message(capsys, *DIGITS_ARGS, "--out", tmp_path / "run", "--resume", path)
    assert message in line
    assert not (tmp_path / "run").exists()


def test_run_in_a_folder_called_checkpoints_is_found(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also from within the folder of its checkpoints, which has no name there."""
    run = tmp_path / "checkpoints"
    ranks(1, save_with_scores, run, "top1", [None] * 2, 3)
    for folder, paths in {
        tmp_path: ("checkpoints", "checkpoints/checkpoints"),
        run: (".", "checkpoints", "checkpoints/step-00000002/.."),
        run / "checkpoints": (".", "..", "step-00000002"),
        step_folder(run, 2): (".", "..", "../.."),
    }.items():
        monkeypatch.chdir(folder)
        for path in paths:
            assert find_checkpoint(Path(path)).path.resolve() == step_folder(run, 2), (folder, path)
            assert main(["checkpoint", "inspect", path]) == 0, (folder, path)
            assert "step-00000002" in capsys.readouterr().out


def test_newer_damaged_checkpoints_are_renamed_after_all_checks(ranks: Any, tmp_path: Path) -> None:
    """A refused resume changes nothing. Otherwise the link to the best checkpoint is moved, too."""
    names = ranks(1, save_with_scores, tmp_path, "top1", [0.1, 0.2, 0.5, 0.4], 4)[0]
    folder = tmp_path / "checkpoints"
    assert (folder / "best").resolve() == step_folder(tmp_path, 3)
    flip_bit(step_folder(tmp_path, 3) / "training.pt")
    with pytest.raises(UsageError, match="step-00000004 of the same run is newer and undamaged"):
        set_aside_newer(checkpoint_named(step_folder(tmp_path, 2)))
    assert sorted(path.name for path in folder.iterdir()) == names
    flip_bit(step_folder(tmp_path, 4) / "training.pt")
    set_aside_newer(checkpoint_named(step_folder(tmp_path, 2)))
    expected_names = ["best", "step-00000001", "step-00000002", "step-00000003.damaged", "step-00000004.damaged"]
    assert sorted(path.name for path in folder.iterdir()) == expected_names
    assert (folder / "best").resolve() == step_folder(tmp_path, 2)


def test_suggested_checkpoint_has_correct_checksums(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint with a flipped bit is not suggested, although its size is correct."""
    cut_tensors(step_folder(run_folder, 6))
    flip_bit(step_folder(run_folder, 4) / "__0_0.distcp")
    line = refusal_message(capsys, *DIGITS_ARGS, "--out", run_folder, "--resume")
    assert f"--resume {step_folder(run_folder, 2)}" in line


def test_inspect_lists_each_checkpoint_and_marks_the_damaged_one(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`everyrank checkpoint inspect` exits with status 1 if a checkpoint is damaged."""
    assert main(["checkpoint", "inspect", str(run_folder)]) == 0
    assert "DAMAGED" not in capsys.readouterr().out
    flip_bit(step_folder(run_folder, 4) / "__0_0.distcp")
    assert main(["checkpoint", "inspect", str(run_folder)]) == 1
    output = capsys.readouterr().out
    assert output.count("DAMAGED") == 1
    assert output.count("step-0000000") == 3


def test_checkpoint_commands_suggest_themselves(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last good checkpoint is no argument of `--resume` there."""
    flip_bit(step_folder(run_folder, 6) / "__0_0.distcp")
    out = run_folder / "w.pt"
    for corrupt in (lambda _: None, cut_about):
        corrupt(step_folder(run_folder, 6))
        line = refusal_message(capsys, "checkpoint", "export", step_folder(run_folder, 6), out)
        assert f"the last good one: everyrank checkpoint export {step_folder(run_folder, 4)}" in line
    line = refusal_message(capsys, "checkpoint", "inspect", step_folder(run_folder, 6))
    assert f"the last good one: everyrank checkpoint inspect {step_folder(run_folder, 4)}" in line
    assert not out.exists()


def paths_without_a_run(folder: Path) -> dict[str, Path]:
    """Create files and folders that are not runs, and return their paths by name. Two of the paths do not exist."""
    (folder / "empty").mkdir()
    (folder / "file").write_text("no folder")
    (folder / "weights.pt").write_bytes(b"no folder either")
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=folder / "foreign", no_dist=True)
    return {name: folder / name for name in ("empty", "file", "weights.pt", "foreign", "missing", "missing/step-3")}


def test_commands_refuse_a_path_that_is_not_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command exits with status 2, prints one line with the path and writes nothing."""
    for name, path in paths_without_a_run(tmp_path).items():
        line = refusal_message(capsys, *DIGITS_ARGS, "--out", tmp_path / "out", "--resume", path)
        assert str(path) in line, name
        line = refusal_message(capsys, "predict", "digits", "--resume", path, "--out", tmp_path / "p.npy")
        assert str(path) in line, name
        for args in (["inspect", path], ["export", path, tmp_path / "w.pt"]):
            assert str(path) in refusal_message(capsys, "checkpoint", *args), name
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "p.npy").exists()
    assert not (tmp_path / "w.pt").exists()
    assert "another program" in refusal_message(capsys, *DIGITS_ARGS, "--resume", tmp_path / "foreign")


def flip_bit(path: Path) -> None:
    """Flip one bit in the middle of the file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def test_all_ranks_report_a_flipped_bit_in_any_file(ranks: Any, run_folder: Path) -> None:
    """Each file is read by one rank. All ranks raise the same error, and it suggests the last intact checkpoint."""
    checkpoint_folder = step_folder(run_folder, 6)
    assert ranks(2, resume_digits, "ddp", checkpoint_folder) == ["", ""]
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp", "training.pt"):
        flip_bit(checkpoint_folder / name)
        first_error, second_error = ranks(2, resume_digits, "ddp", checkpoint_folder)
        assert first_error == second_error
        assert "\n" not in first_error
        assert f"{name} was changed after it was saved" in first_error
        assert f"--resume {step_folder(run_folder, 4)}" in first_error
        flip_bit(checkpoint_folder / name)


def test_train_reports_a_flipped_bit(cli: Cli, run_folder: Path, tmp_path: Path) -> None:
    flip_bit(step_folder(run_folder, 6) / "__1_0.distcp")
    args = ("--layout", "ddp", "--processes", "2", "--out", run_folder, "--resume")
    result = cli(tmp_path, *DIGITS_ARGS, *args)
    assert result.status == 2, result.err
    line = only_error_line(result.err)
    assert "__1_0.distcp" in line
    assert f"--resume {step_folder(run_folder, 4)}" in line


# --- a different workload


def resume_changed_workload(world: World, checkpoint_folder: Path, changes: dict[str, Any]) -> str:
    """Resume with a changed workload and return the error message, or an empty string."""
    session = TrainingSession(world, dataclasses.replace(mixed_workload(), **changes), "single:precision=float64")
    try:
        resume(session.prepared, world, checkpoint_named(checkpoint_folder), session.metadata())
    except UsageError as error:
        return str(error)
    return ""


class ModelWithExtraLayer(MixedModel):
    """A model with one parameter more than `MixedModel`."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 2, bias=False)


class ModelWithOtherShape(MixedModel):
    """A model with the names of `MixedModel` and a buffer of a different shape."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(1, 2))


def two_parameter_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with two parameter groups."""
    first_parameter, *other_parameters = model.parameters()
    return torch.optim.SGD([{"params": [first_parameter]}, {"params": other_parameters}], lr=0.05, momentum=0.9)


def test_resume_refuses_a_different_workload(ranks: Any, tmp_path: Path) -> None:
    """The error is one line that names the difference."""
    ranks(1, train_and_save, "single", "sgd", tmp_path)
    checkpoint_folder = find_checkpoint(tmp_path).path
    expected: list[tuple[dict[str, Any], str]] = [
        ({"seed": 1}, "seed"),
        ({"global_batch": 8}, "global_batch"),
        ({"clip_norm": 0.25}, "clip_norm"),
        ({"name": "another"}, "workload"),
        ({"train_data": lambda: zoo.AugmentedPoints(24)}, "samples"),
        ({"model": ModelWithExtraLayer}, "head.bias"),
        ({"model": ModelWithOtherShape}, "offset"),
        ({"optimizer": two_parameter_groups}, "groups"),
        ({"schedule": None}, "SGD and NoneType"),
        ({"optimizer": lambda model: torch.optim.Adagrad(model.parameters())}, "Adagrad"),
    ]
    for changes, fragment in expected:
        (line,) = ranks(1, resume_changed_workload, checkpoint_folder, changes)
        assert fragment in line, changes
        assert "\n" not in line
