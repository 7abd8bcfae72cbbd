"""One run that is evaluated, predicted, exported, logged and gone on with."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everyrank.cli import main
from everyrank.record import read_records
from everyrank.runs import checkpoints_of
from processes import Cli, one_line, refused
from resuming import WIDTH, WORKLOAD, logged, table

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="looking for left processes needs Linux's /proc"
)

# --- one run of digits that is then used in every way


@pytest.fixture(scope="module")
def digits(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """30 updates under ddp on two ranks, and what the command said. --resume finds nothing there, and begins."""
    folder = tmp_path_factory.mktemp("digits")
    words = "train digits --layout ddp --processes 2 --set width=4 --steps 30 --save-every 10 --keep 2"
    done = cli(folder, *words.split(), "--evaluate-every", "10", "--out", "run", "--resume")
    assert done.status == 0, done.err
    return folder / "run", done.out


# --- what cannot be gone on with


def test_nothing_to_go_on_from_is_said(digits: tuple[Path, str]) -> None:
    assert "no checkpoint in run" in digits[1]


def test_going_on_needs_a_place(capsys: pytest.CaptureFixture[str], digits: tuple[Path, str]) -> None:
    """Neither --resume without a place nor --out on top of another run is guessed at."""
    assert "--out DIR" in refused(capsys, "train", "digits", *WIDTH, "--resume")
    line = refused(capsys, "train", "digits", *WIDTH, "--out", digits[0])
    assert "--resume" in line
    assert "--resume" in line
    line = refused(capsys, "train", "digits", *WIDTH, "--evaluate")
    assert "--resume" in line
    assert "--pretrained" in line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--set", "width=4", "seed=1"), ["seed=0", "seed=1"]),
        (("--set", "width=5"), ["width=4", "width=5"]),
        (("--set", "width=4", "lr=0.1"), ["lr=0.1"]),
        (("--set", "width=4", "--batch", "32"), ["global_batch=64", "global_batch=32"]),
        (("--set", "width=4", "--steps", "20"), ["30 updates are done already", "20"]),
    ],
    ids=["seed", "width", "rate", "batch", "steps"],
)
def test_another_training_is_not_gone_on_with(
    cli: Cli, digits: tuple[Path, str], tmp_path: Path, words: tuple[str, ...], expected: list[str]
) -> None:
    """Status 2, and the line names what differs; the run is as it was, but for what an autopsy reads."""

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and "autopsy" not in path.parts}

    run = digits[0]
    before = contents()
    done = cli.on_ranks(tmp_path, "train", "digits", *words, "--out", run, "--resume")
    assert done.status == 2, done
    line = one_line(done.err)
    for word in expected:
        assert word in line
    assert contents() == before


def test_another_workload_is_not_gone_on_with(cli: Cli, digits: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WORKLOAD)
    done = cli.on_ranks(tmp_path, "train", "mine.py", "--resume", digits[0])
    assert done.status == 2, done
    line = one_line(done.err)
    assert "digits" in line
    assert "mine" in line
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


# --- evaluated, predicted, exported


@pytest.mark.parametrize(("layout", "size"), [("ddp", 2), ("single", 1), ("fsdp", 3), ("zero1", 4)])
def test_evaluating_says_what_training_said(
    cli: Cli, digits: tuple[Path, str], tmp_path: Path, layout: str, size: int
) -> None:
    """Under any layout: top1 to the last digit, and nothing is trained or written into the run."""
    run = digits[0]
    (trained,) = read_records(run / "record.json")
    before = sorted(run.rglob("*"))
    words = ("--evaluate", "--resume", run, "--layout", layout, "--json", "r.json")
    done = cli.on_ranks(tmp_path, "train", "digits", *WIDTH, *words, size=size)
    assert done.status == 0, done
    (record,) = read_records(tmp_path / "r.json")
    assert record.metrics["top1"] == trained.metrics["top1"]
    assert record.metrics["eval_loss"] == pytest.approx(trained.metrics["eval_loss"], rel=1e-6)
    assert record.world_size == size
    assert not record.loss
    assert sorted(run.rglob("*")) == before
    assert not (tmp_path / "runs").exists()


def test_predictions_are_in_the_order_of_the_data(cli: Cli, digits: tuple[Path, str], tmp_path: Path) -> None:
    """Identical on 1 to 4 ranks, a row for each held-out image; .npy says the same."""
    from everyrank.builtin.digits import Digits

    run = digits[0]
    (trained,) = read_records(run / "record.json")
    found: dict[int, list[dict[str, Any]]] = {}
    for size in (1, 2, 3, 4):
        layout = "single" if size == 1 else "ddp"
        words = ("--resume", run, "--layout", layout, "--out", f"p{size}.jsonl")
        done = cli.on_ranks(tmp_path, "predict", "digits", *WIDTH, *words, size=size)
        assert done.status == 0, done
        assert "359 predictions" in done.out
        found[size] = [json.loads(line) for line in (tmp_path / f"p{size}.jsonl").read_text().splitlines()]
        assert [row["index"] for row in found[size]] == list(range(359))
    words = ("--resume", run, "--layout", "fsdp", "--out", "p.npy")
    assert cli.on_ranks(tmp_path, "predict", "digits", *WIDTH, *words, size=2).status == 0
    assert found[1] == found[2] == found[3] == found[4]
    values = {size: np.array([row["prediction"] for row in rows]) for size, rows in found.items()}
    values[0] = np.load(tmp_path / "p.npy")
    assert np.array_equal(values[0], values[1])
    classes = values[1] if values[1].ndim == 1 else values[1].argmax(1)
    labels = Digits(held_out=True).tensors[1].numpy()
    assert float((classes == labels).mean()) == pytest.approx(trained.metrics["top1"], abs=1e-12)


def test_exported_weights_are_the_model(
    cli: Cli, digits: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """.safetensors and .pt hold the same tensors, open without everyrank, and give the same metrics."""
    from safetensors.torch import load_file

    run = digits[0]
    (trained,) = read_records(run / "record.json")
    for name in ("w.pt", "w.safetensors"):
        assert main(["checkpoint", "export", str(run), str(tmp_path / name)]) == 0
    one, other = torch.load(tmp_path / "w.pt", weights_only=True), load_file(tmp_path / "w.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    for name in ("w.pt", "w.safetensors"):
        words = ("--evaluate", "--pretrained", name, "--json", "r.json")
        done = cli.on_ranks(tmp_path, "train", "digits", *WIDTH, *words)
        assert done.status == 0, done
        (record,) = read_records(tmp_path / "r.json")
        assert record.metrics["top1"] == trained.metrics["top1"]
        assert record.metrics["eval_loss"] == pytest.approx(trained.metrics["eval_loss"], rel=1e-6)


class Hostile:
    """A pickle that calls a function when it is opened."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def test_weights_that_are_none_are_refused(cli: Cli, digits: tuple[Path, str], tmp_path: Path) -> None:
    """Of another model, no weights at all, cut off, hostile: status 2, one line, and nothing of it happens."""
    mark = tmp_path / "it-ran"
    assert main(["checkpoint", "export", str(digits[0]), str(tmp_path / "w.pt")]) == 0
    assert main(["checkpoint", "export", str(digits[0]), str(tmp_path / "w.safetensors")]) == 0
    state = torch.load(tmp_path / "w.pt", weights_only=True)
    name = next(iter(state))
    torch.save({key: value for key, value in state.items() if key != name}, tmp_path / "missing.pt")
    torch.save({**state, "another": torch.ones(1)}, tmp_path / "foreign.pt")
    torch.save({**state, name: torch.ones(1)}, tmp_path / "shape.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({**state, name: Hostile(mark)}, tmp_path / "hostile.pt")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(Hostile(mark)))
    for suffix in (".pt", ".safetensors"):
        content = (tmp_path / f"w{suffix}").read_bytes()
        (tmp_path / f"cut{suffix}").write_bytes(content[: len(content) // 2])
    expected = {
        "missing.pt": name,
        "foreign.pt": "another",
        "shape.pt": name,
        "list.pt": "list",
        "hostile.pt": "weights",
        "pickle.pt": "weights",
        "cut.pt": "cut.pt",
        "cut.safetensors": "cut.safetensors",
        "nothing.pt": "no such file",
        "mine.py": "safetensors",
    }
    for file, word in expected.items():
        done = cli.on_ranks(tmp_path, "train", "digits", *WIDTH, "--evaluate", "--pretrained", file)
        assert done.status == 2, (file, done)
        line = one_line(done.err)
        assert file in line
        assert word in line
        assert not mark.exists(), file


def test_hostile_weights_for_a_rank_that_we_start(cli: Cli, tmp_path: Path) -> None:
    """The same line, and no other one, where the rank is a process of ours."""
    mark = tmp_path / "it-ran"
    torch.save({"weight": Hostile(mark)}, tmp_path / "hostile.pt")
    running = cli.start(tmp_path, "train", "digits", *WIDTH, "--evaluate", "--pretrained", "hostile.pt")
    status, _, err = running.end()
    assert status == 2, err
    assert "hostile.pt" in one_line(err)
    assert not mark.exists()


# --- what a run leaves


def test_a_run_leaves_what_it_says(digits: tuple[Path, str]) -> None:
    """A row for every update and every epoch, an evaluation every 10 updates, the last two checkpoints and the best."""
    run, said = digits
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows[:-1]] == list(range(30))
    (record,) = read_records(run / "record.json")
    assert rows[-1] == {"final": record.metrics}
    assert record.loss == [row["loss"] for row in rows[:-1]]
    updates = table(run / "log.csv")
    assert [int(row["step"]) for row in updates] == list(range(30))
    assert [float(row["loss"]) for row in updates] == record.loss
    (epoch,) = table(run / "epochs.csv")
    assert (epoch["epoch"], epoch["step"]) == ("0", "23")
    losses = sum(row["loss"] * row["terms"] for row in rows[:23]) / sum(row["terms"] for row in rows[:23])
    assert float(epoch["loss"]) == pytest.approx(losses, rel=1e-12)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    scores = {row["step"]: row["evaluation"] for row in events if "evaluation" in row and "seconds" in row}
    assert list(scores) == [10, 20, 30]
    assert scores[30] == record.metrics
    there = checkpoints_of(run)
    best = max(scores, key=lambda step: scores[step]["top1"])
    assert [one.metadata.step for one in there] == sorted({20, 30, best})
    assert [one.metadata.metrics for one in there] == [scores[one.metadata.step] for one in there]
    assert (run / "checkpoints" / "best").resolve().name == f"step-{best:08d}"
    assert f"{len(there)} checkpoints, the newest step-00000030" in said
    assert {path.name for path in run.iterdir() if path.is_file()} == {
        "log.jsonl", "log.csv", "events.jsonl", "epochs.csv", "memberships.jsonl", "resources.csv", "record.json"
    }  # fmt: skip


# --- trackers


def test_tensorboard_has_the_losses(cli: Cli, tmp_path: Path) -> None:
    """Every loss under the number of updates done; after going on, each of them once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = ("train", "digits", *WIDTH, "--out", "run", "--save-every", "4", "--tracker", "tensorboard")
    for more in (("--steps", "6"), ("--steps", "9", "--resume")):
        done = cli.on_ranks(tmp_path, *words, *more)
        assert done.status == 0, done
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006", ignore_errors=True)  # as if it had crashed
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    rows = logged(tmp_path / "run")
    losses = events.Scalars("loss")
    assert [one.step for one in losses] == list(range(1, 10))
    assert [one.value for one in losses] == pytest.approx([row[2] for row in rows], rel=1e-6)
    assert [one.step for one in events.Scalars("top1")][-1] == 9


def test_wandb_keeps_its_run_here(cli: Cli, tmp_path: Path) -> None:
    """Offline it needs neither key nor network, and leaves its run in ours."""
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("logging to wandb is not verified: it is not installed")
    words = ("train", "digits", *WIDTH, "--steps", "3", "--save-every", "0", "--out", "run", "--tracker", "wandb")
    done = cli(tmp_path, *words, WANDB_MODE="offline", WANDB_SILENT="true")
    assert done.status == 0, done.err
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    assert b"eval_loss" in file.read_bytes()


def test_a_tracker_nobody_knows(cli: Cli, tmp_path: Path) -> None:
    """Status 2, one line that names those there are; no folder of a run is left."""
    done = cli.on_ranks(tmp_path, "train", "digits", *WIDTH, "--steps", "3", "--tracker", "nonsense")
    assert done.status == 2, done
    line = one_line(done.err)
    assert "--tracker nonsense" in line
    assert "tensorboard, wandb" in line
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())
