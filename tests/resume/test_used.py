"""One run that is resumed, evaluated, predicted, exported and logged."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from everyrank.checkpoint.weights import export
from everyrank.cli import main
from everyrank.errors import EveryrankError, UsageError
from everyrank.record import read_records
from everyrank.runs import checkpoints_of, find_checkpoint
from everyrank.train.trackers import open_tracker
from processes import Cli, only_error_line, refusal_message
from resuming import WIDTH_ARGS, WORKLOAD, logged_updates, read_csv

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="looking for left processes needs Linux's /proc"
)

# --- one run of digits for all tests of this file


@pytest.fixture(scope="module")
def digits(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder and the output of a run with 30 updates of DDP on two ranks.

    --resume finds no checkpoint, so the run starts from scratch.
    """
    folder = tmp_path_factory.mktemp("digits")
    args = "train digits --layout ddp --processes 2 --set width=4 --steps 30 --save-every 10 --keep 2"
    result = cli(folder, *args.split(), "--evaluate-every", "10", "--out", "run", "--resume")
    assert result.status == 0, result.err
    return folder / "run", result.out


# --- what cannot be resumed


def test_missing_checkpoint_for_resume_is_reported(digits: tuple[Path, str]) -> None:
    """The output names the folder."""
    assert "no checkpoint in run" in digits[1]


def test_resume_without_a_folder_is_refused(capsys: pytest.CaptureFixture[str], digits: tuple[Path, str]) -> None:
    """--resume needs a folder, and --out does not overwrite another run. --evaluate needs weights."""
    assert "--out DIR" in refusal_message(capsys, "train", "digits", *WIDTH_ARGS, "--resume")
    error_line = refusal_message(capsys, "train", "digits", *WIDTH_ARGS, "--out", digits[0])
    assert "--resume" in error_line
    assert str(digits[0]) in error_line
    error_line = refusal_message(capsys, "train", "digits", *WIDTH_ARGS, "--evaluate")
    assert "--resume" in error_line
    assert "--pretrained" in error_line


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--set", "width=4", "seed=1"), ["seed=0", "seed=1"]),
        (("--set", "width=5"), ["width=4", "width=5"]),
        (("--set", "width=4", "lr=0.1"), ["lr=0.1"]),
        (("--set", "width=4", "--batch", "32"), ["global_batch=64", "global_batch=32"]),
        (("--set", "width=4", "--steps", "20"), ["30 updates are done already", "20"]),
    ],
    ids=["seed", "width", "rate", "batch", "steps"],
)
def test_run_with_different_settings_is_not_resumed(
    cli: Cli, digits: tuple[Path, str], tmp_path: Path, args: tuple[str, ...], expected: list[str]
) -> None:
    """The exit code is 2, and the error names the difference.

    The run is unchanged, except for its autopsy files.
    """

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and "autopsy" not in path.parts}

    run = digits[0]
    contents_before = contents()
    result = cli.on_ranks(tmp_path, "train", "digits", *args, "--out", run, "--resume")
    assert result.status == 2, result
    error_line = only_error_line(result.err)
    for expected_text in expected:
        assert expected_text in error_line
    assert contents() == contents_before


def test_run_of_another_workload_is_not_resumed(cli: Cli, digits: tuple[Path, str], tmp_path: Path) -> None:
    """The error names both workloads, and no new run folder is left."""
    (tmp_path / "mine.py").write_text(WORKLOAD)
    result = cli.on_ranks(tmp_path, "train", "mine.py", "--resume", digits[0])
    assert result.status == 2, result
    error_line = only_error_line(result.err)
    assert "digits" in error_line
    assert "mine" in error_line
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


# --- evaluation, prediction, export


@pytest.mark.parametrize(("layout", "size"), [("ddp", 2), ("single", 1), ("fsdp", 3), ("zero1", 4)])
def test_evaluation_gives_the_metrics_of_training(
    cli: Cli, digits: tuple[Path, str], tmp_path: Path, layout: str, size: int
) -> None:
    """The layout may differ. Nothing is trained, and nothing is written into the run."""
    run = digits[0]
    (training_record,) = read_records(run / "record.json")
    files_before = sorted(run.rglob("*"))
    args = ("--evaluate", "--resume", run, "--layout", layout, "--json", "r.json")
    result = cli.on_ranks(tmp_path, "train", "digits", *WIDTH_ARGS, *args, size=size)
    assert result.status == 0, result
    (record,) = read_records(tmp_path / "r.json")
    assert record.metrics["top1"] == training_record.metrics["top1"]
    assert record.metrics["eval_loss"] == pytest.approx(training_record.metrics["eval_loss"], rel=1e-6)
    assert record.world_size == size
    assert not record.loss
    assert sorted(run.rglob("*")) == files_before
    assert not (tmp_path / "runs").exists()


def test_predictions_are_in_the_order_of_the_data(cli: Cli, digits: tuple[Path, str], tmp_path: Path) -> None:
    """Each validation image has one row, identical on 1 to 4 ranks. The .npy file has the same values."""
    from everyrank.builtin.digits import Digits

    run = digits[0]
    (training_record,) = read_records(run / "record.json")
    rows_by_size: dict[int, list[dict[str, Any]]] = {}
    for size in (1, 2, 3, 4):
        layout = "single" if size == 1 else "ddp"
        args = ("--resume", run, "--layout", layout, "--out", f"p{size}.jsonl")
        result = cli.on_ranks(tmp_path, "predict", "digits", *WIDTH_ARGS, *args, size=size)
        assert result.status == 0, result
        assert "359 predictions" in result.out
        rows_by_size[size] = [json.loads(line) for line in (tmp_path / f"p{size}.jsonl").read_text().splitlines()]
        assert [row["index"] for row in rows_by_size[size]] == list(range(359))
    args = ("--resume", run, "--layout", "fsdp", "--out", "p.npy")
    assert cli.on_ranks(tmp_path, "predict", "digits", *WIDTH_ARGS, *args, size=2).status == 0
    assert rows_by_size[1] == rows_by_size[2] == rows_by_size[3] == rows_by_size[4]
    predictions = {size: np.array([row["prediction"] for row in rows]) for size, rows in rows_by_size.items()}
    predictions[0] = np.load(tmp_path / "p.npy")
    assert np.array_equal(predictions[0], predictions[1])
    classes = predictions[1] if predictions[1].ndim == 1 else predictions[1].argmax(1)
    labels = Digits(is_validation=True).tensors[1].numpy()
    assert float((classes == labels).mean()) == pytest.approx(training_record.metrics["top1"], abs=1e-12)


def test_exported_weights_give_the_metrics_of_training(
    cli: Cli, digits: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The .safetensors and .pt files have the same tensors. They open without everyrank.

    An evaluation of them gives the metrics of the run.
    """
    from safetensors.torch import load_file

    run = digits[0]
    (training_record,) = read_records(run / "record.json")
    for name in ("w.pt", "w.safetensors"):
        assert main(["checkpoint", "export", str(run), str(tmp_path / name)]) == 0
    pt_weights, safetensors_weights = (
        torch.load(tmp_path / "w.pt", weights_only=True),
        load_file(tmp_path / "w.safetensors"),
    )
    assert pt_weights.keys() == safetensors_weights.keys()
    assert all(torch.equal(pt_weights[key], safetensors_weights[key]) for key in pt_weights)
    for name in ("w.pt", "w.safetensors"):
        args = ("--evaluate", "--pretrained", name, "--json", "r.json")
        result = cli.on_ranks(tmp_path, "train", "digits", *WIDTH_ARGS, *args)
        assert result.status == 0, result
        (record,) = read_records(tmp_path / "r.json")
        assert record.metrics["top1"] == training_record.metrics["top1"]
        assert record.metrics["eval_loss"] == pytest.approx(training_record.metrics["eval_loss"], rel=1e-6)


class Hostile:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def test_export_names_a_path_that_cannot_be_written(digits: tuple[Path, str], tmp_path: Path) -> None:
    """The folder of the first is a file. The name of the second is too long, with the suffix of a partial file."""
    (tmp_path / "file").write_text("")
    checkpoint = find_checkpoint(digits[0])
    for path in (tmp_path / "file" / "w.pt", tmp_path / f"{'w' * 250}.pt"):
        with pytest.raises(UsageError, match="cannot be written"):
            export(checkpoint, path)


def test_invalid_weight_files_are_refused(cli: Cli, digits: tuple[Path, str], tmp_path: Path) -> None:
    """The files belong to another model, have no weights, are truncated, or run code when they are unpickled.

    The exit code is 2, the error is one line, and no code runs.
    """
    marker = tmp_path / "it-ran"
    assert main(["checkpoint", "export", str(digits[0]), str(tmp_path / "w.pt")]) == 0
    assert main(["checkpoint", "export", str(digits[0]), str(tmp_path / "w.safetensors")]) == 0
    state = torch.load(tmp_path / "w.pt", weights_only=True)
    name = next(iter(state))
    torch.save({key: value for key, value in state.items() if key != name}, tmp_path / "missing.pt")
    torch.save({**state, "another": torch.ones(1)}, tmp_path / "foreign.pt")
    torch.save({**state, name: torch.ones(1)}, tmp_path / "shape.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({**state, name: Hostile(marker)}, tmp_path / "hostile.pt")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(Hostile(marker)))
    for suffix in (".pt", ".safetensors"):
        content = (tmp_path / f"w{suffix}").read_bytes()
        (tmp_path / f"cut{suffix}").write_bytes(content[: len(content) // 2])
    expected_texts = {
        "missing.pt": name,
        "foreign.pt": "another",
        "shape.pt": name,
        "list.pt": "list",
        "hostile.pt": "could run code",
        "pickle.pt": "could run code",
        "cut.pt": "cut.pt",
        "cut.safetensors": "cut.safetensors",
        "nothing.pt": "no such file",
        "mine.py": "safetensors",
    }
    for file, expected_text in expected_texts.items():
        result = cli.on_ranks(tmp_path, "train", "digits", *WIDTH_ARGS, "--evaluate", "--pretrained", file)
        assert result.status == 2, (file, result)
        error_line = only_error_line(result.err).replace(str(tmp_path), "")  # the folder is named after the test
        assert file in error_line
        assert expected_text in error_line
        assert not marker.exists(), file


def test_hostile_weights_run_no_code_in_a_launched_rank(cli: Cli, tmp_path: Path) -> None:
    """The rank is a process that everyrank starts. It prints one line and runs no code of the file."""
    marker = tmp_path / "it-ran"
    torch.save({"weight": Hostile(marker)}, tmp_path / "hostile.pt")
    running = cli.start(tmp_path, "train", "digits", *WIDTH_ARGS, "--evaluate", "--pretrained", "hostile.pt")
    status, _, err = running.end()
    assert status == 2, err
    assert "hostile.pt" in only_error_line(err)
    assert not marker.exists()


# --- the files of a run


def test_run_folder_has_logs_and_checkpoints(digits: tuple[Path, str]) -> None:
    """The logs have a row for each update and each epoch, and an evaluation every 10 updates.

    The last two checkpoints and the best one are kept.
    """
    run, output = digits
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows[:-1]] == list(range(30))
    (record,) = read_records(run / "record.json")
    assert rows[-1] == {"final": record.metrics}
    assert record.loss == [row["loss"] for row in rows[:-1]]
    update_rows = read_csv(run / "log.csv")
    assert [int(row["step"]) for row in update_rows] == list(range(30))
    assert [float(row["loss"]) for row in update_rows] == record.loss
    (epoch,) = read_csv(run / "epochs.csv")
    assert (epoch["epoch"], epoch["step"]) == ("0", "23")
    epoch_loss = sum(row["loss"] * row["terms"] for row in rows[:23]) / sum(row["terms"] for row in rows[:23])
    assert float(epoch["loss"]) == pytest.approx(epoch_loss, rel=1e-12)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    scores = {row["step"]: row["evaluation"] for row in events if "evaluation" in row and "seconds" in row}
    assert list(scores) == [10, 20, 30]
    assert scores[30] == record.metrics
    checkpoints = checkpoints_of(run)
    best = max(scores, key=lambda step: scores[step]["top1"])
    assert [checkpoint.metadata.step for checkpoint in checkpoints] == sorted({20, 30, best})
    assert [checkpoint.metadata.metrics for checkpoint in checkpoints] == [
        scores[checkpoint.metadata.step] for checkpoint in checkpoints
    ]
    assert (run / "checkpoints" / "best").resolve().name == f"step-{best:08d}"
    assert f"{len(checkpoints)} checkpoints, the newest step-00000030" in output
    assert {path.name for path in run.iterdir() if path.is_file()} == {
        "log.jsonl", "log.csv", "events.jsonl", "epochs.csv", "memberships.jsonl", "resources.csv", "record.json"
    }  # fmt: skip


# --- trackers


def test_tensorboard_has_the_losses(cli: Cli, tmp_path: Path) -> None:
    """Each loss has the number of completed updates. After a resume each update appears once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = ("train", "digits", *WIDTH_ARGS, "--out", "run", "--save-every", "4", "--tracker", "tensorboard")
    for options in (("--steps", "6"), ("--steps", "9", "--resume")):
        result = cli.on_ranks(tmp_path, *args, *options)
        assert result.status == 0, result
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006", ignore_errors=True)  # like after a crash
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    rows = logged_updates(tmp_path / "run")
    losses = events.Scalars("loss")
    assert [scalar.step for scalar in losses] == list(range(1, 10))
    assert [scalar.value for scalar in losses] == pytest.approx([row[2] for row in rows], rel=1e-6)
    assert [scalar.step for scalar in events.Scalars("top1")][-1] == 9


def test_wandb_writes_into_the_run_folder(cli: Cli, tmp_path: Path) -> None:
    """Offline wandb needs neither a key nor the network. Its files are in the run folder."""
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("logging to wandb is not verified: it is not installed")
    args = ("train", "digits", *WIDTH_ARGS, "--steps", "3", "--save-every", "0", "--out", "run", "--tracker", "wandb")
    result = cli(tmp_path, *args, WANDB_MODE="offline", WANDB_SILENT="true")
    assert result.status == 0, result.err
    (wandb_run,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (wandb_file,) = wandb_run.glob("*.wandb")
    assert b"eval_loss" in wandb_file.read_bytes()


def test_tensorboard_of_a_run_restarted_before_its_first_checkpoint(tmp_path: Path) -> None:
    """The second start begins at step 0 in the same folder. Each update appears once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for num_updates, loss in ((5, 1.0), (3, 2.0)):
        tracker = open_tracker("tensorboard", tmp_path, {}, 0)
        for step in range(1, num_updates + 1):
            tracker.log(step, {"loss": loss})
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("loss")] == [(1, 2.0), (2, 2.0), (3, 2.0)]


@pytest.mark.parametrize(
    ("mode", "error", "message"),
    [
        ("", "no key", "no key; WANDB_MODE=offline needs neither key nor network"),
        ("online", "", "ValueError; WANDB_MODE=offline needs neither key nor network"),
        ("offline", "[Errno 20] Not a directory: 'run'", "[Errno 20] Not a directory: 'run'"),
        (
            "off",
            "1 validation error\nmode\n  Input should be 'online'",
            "1 validation error mode Input should be 'online'",
        ),
    ],
)
def test_error_of_wandb_is_one_line(
    mode: str, error: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has all lines of the error, and advises the offline mode only if it is online."""

    def fail(**_: Any) -> None:
        raise ValueError(error)

    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=fail, Settings=lambda **_: None))
    with pytest.raises(EveryrankError) as error_info:
        open_tracker("wandb", tmp_path, {}, 0)
    assert str(error_info.value) == f"--tracker wandb: {message}"


def test_unknown_tracker_is_refused(cli: Cli, tmp_path: Path) -> None:
    """The exit code is 2. The error lists the known trackers, and no run folder is left."""
    result = cli.on_ranks(tmp_path, "train", "digits", *WIDTH_ARGS, "--steps", "3", "--tracker", "nonsense")
    assert result.status == 2, result
    error_line = only_error_line(result.err)
    assert "--tracker nonsense" in error_line
    assert "tensorboard, wandb" in error_line
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())
