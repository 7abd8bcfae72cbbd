"""The command line around checkpoints: killed, stopped and gone on with; evaluated, predicted, exported, logged."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import importlib.util
import json
import os
import pickle
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everyrank.cli import main
from everyrank.record import read_records
from everyrank.runs import checkpoints_of, damage, find_checkpoint, write_about
from processes import Cli, Forge

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="looking for left processes needs Linux's /proc"
)

WORKLOAD = """\
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from everyrank import Workload

SLEEP = float(os.environ.get("SLEEP", "0"))  # of every sample


class Noisy(Dataset):
    def __init__(self, length, noise):
        generator = torch.Generator().manual_seed(length)
        self.inputs = torch.randn(length, 5, generator=generator)
        self.targets = torch.randn(length, 2, generator=generator)
        self.noise = noise

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if self.noise:
            time.sleep(SLEEP)
            Path("reached").touch()
        noise = torch.randn(5) + random.random() + float(np.random.rand())
        return self.inputs[index] + self.noise * noise, self.targets[index]


def squared(output, target):
    return (output - target).square().sum(), len(target)


def model():
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


workload = Workload(
    name="mine",
    model=model,
    train_data=lambda: Noisy(46, 0.1),
    eval_data=lambda: Noisy(16, 0.0),
    loss=squared,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8),
    global_batch=8,
    clip_norm=1.0,
    steps=30,
)
"""

STEPS, SAVE_EVERY = 30, 5


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line with which the command line ends, with status 2."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        status = main([str(word) for word in words])
    finally:
        signal.signal(signal.SIGTERM, before)
    printed = capsys.readouterr()
    assert status == 2, printed.out + printed.err
    return one_line(printed.err)


def one_line(stderr: str) -> str:
    assert "Traceback" not in stderr
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("everyrank: "), stderr
    return lines[0]


# --- (1) killed, and gone on with


def words_for(layout: str, *more: str, out: str = "run") -> list[str]:
    (options, comma) = (layout.partition(":")[2], "," if ":" in layout else ":")
    assert not options or comma == ","
    return [
        "train",
        "mine.py",
        "--layout",
        f"{layout}{comma}precision=float64",
        "--save-every",
        "5",
        "--out",
        out,
        *more,
    ]


@pytest.fixture(scope="module")
def whole(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run under a layout on two ranks that nothing happened to."""
    made: dict[str, Path] = {}

    def run(layout: str) -> Path:
        if layout not in made:
            folder = tmp_path_factory.mktemp(layout)
            (folder / "mine.py").write_text(WORKLOAD)
            done = forge(folder, *words_for(layout), size=2)
            assert done.status == 0, done
            made[layout] = folder / "run"
        return made[layout]

    return run


def logged(run: Path) -> list[tuple[int, int, float, float, float]]:
    """Step, epoch, loss, rate and number of terms of every update in the log, in the order of the file."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [(row["step"], row["epoch"], row["loss"], row["lr"], row["terms"]) for row in rows if "step" in row]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def weights_of(place: Path, to: Path) -> dict[str, torch.Tensor]:
    assert main(["checkpoint", "export", str(place), str(to)]) == 0
    return torch.load(to, weights_only=True)


def is_the_same_run(run: Path, expected: Path, folder: Path) -> None:
    """One trajectory: every update once and as it would have been, and the same weights, to the last bit."""
    rows = logged(run)
    assert [row[0] for row in rows] == list(range(STEPS))
    assert rows == logged(expected)
    columns = ("step", "epoch", "loss", "lr", "terms")
    one, other = table(run / "log.csv"), table(expected / "log.csv")
    assert [[row[name] for name in columns] for row in one] == [[row[name] for name in columns] for row in other]
    one, other = table(run / "epochs.csv"), table(expected / "epochs.csv")
    assert [row["epoch"] for row in one] == ["0", "1", "2", "3", "4"]
    assert [float(row["loss"]) for row in one] == pytest.approx([float(row["loss"]) for row in other], rel=1e-12)
    assert [row["eval_loss"] for row in one] == [row["eval_loss"] for row in other]
    (record,), (expected_record,) = read_records(run / "record.json"), read_records(expected / "record.json")
    assert record.loss == expected_record.loss
    assert record.metrics == expected_record.metrics
    assert find_checkpoint(run).about.step == STEPS
    weights, others = weights_of(run, folder / "one.pt"), weights_of(expected, folder / "other.pt")
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        assert torch.equal(value, others[name]), name


def first_checkpoint(run: Path) -> Callable[[], bool]:
    return lambda: (run / "checkpoints" / f"step-{SAVE_EVERY:08d}").exists()


@pytest.mark.parametrize(
    ("layout", "more"),
    [("ddp", ["--workers", "1"]), ("zero1", ["--save-async"]), ("fsdp", [])],
    ids=["ddp", "zero1", "fsdp"],
)
def test_a_run_that_is_killed_goes_on_to_the_last_bit(
    cli: Cli, forge: Forge, whole: Callable[[str], Path], layout: str, more: list[str]
) -> None:
    """SIGKILL to all its processes at a random moment; the same command with --resume makes the same run of it."""
    (cli.folder / "mine.py").write_text(WORKLOAD)
    run = cli.folder / "run"
    cli.start(*words_for(layout, "--processes", "2", *more), SLEEP="0.01")
    cli.wait_for(first_checkpoint(run))
    pause = random.Random(layout).uniform(0.0, 0.6)
    time.sleep(pause)
    for pid in cli.processes():
        os.kill(pid, signal.SIGKILL)
    assert cli.left() == {}
    for one in checkpoints_of(run):
        assert damage(one) is None
    assert find_checkpoint(run).about.step < STEPS, f"killed too late, after {pause} s"
    assert not (run / "record.json").exists()
    if layout == "ddp":
        cli.start(*words_for(layout, "--processes", "2", *more, "--resume"))
        status, out, err = cli.end()
    else:
        status, out, err = forge(cli.folder, *words_for(layout, *more, "--resume"), size=2)
        status = max(status)
    assert status == 0, err
    assert "going on after update" in out
    is_the_same_run(run, whole(layout), cli.folder)


def test_a_run_that_goes_on_from_an_older_checkpoint(
    forge: Forge, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    """Beside the run, in a folder of its own: in the same one, what came after it would be lost, or mixed up."""
    (tmp_path / "mine.py").write_text(WORKLOAD)
    done = forge(tmp_path, *words_for("ddp", "--steps", "20"), size=2)
    assert done.status == 0, done
    older = tmp_path / "run" / "checkpoints" / "step-00000010"
    words = words_for("ddp", "--steps", "15", "--resume", str(older))
    done = forge(tmp_path, *words, size=2)
    assert done.status == 2
    assert "newer, and whole; give another --out" in done.err
    assert [row[0] for row in logged(tmp_path / "run")] == list(range(20))
    done = forge(tmp_path, *words, "--out", "other", size=2)
    assert done.status == 0, done
    assert [row[0] for row in logged(tmp_path / "other")] == list(range(15))
    done = forge(tmp_path, *words_for("ddp", "--resume", "--out", "other"), size=2)
    assert done.status == 0, done
    is_the_same_run(tmp_path / "other", whole("ddp"), tmp_path)


# --- (2) stopped by a signal


def test_sigterm_saves_and_says_how_to_go_on(cli: Cli, forge: Forge, whole: Callable[[str], Path]) -> None:
    """Status 143; the update in progress is done and saved, no rank is left, and --resume makes the same run of it."""
    (cli.folder / "mine.py").write_text(WORKLOAD)
    run = cli.folder / "run"
    cli.start(*words_for("ddp", "--processes", "2", "--workers", "1"), SLEEP="0.06")
    cli.wait_for(first_checkpoint(run))
    cli.wait_for(lambda: (run / "log.jsonl").read_text().count("\n") == SAVE_EVERY + 1)
    assert cli.process is not None
    os.kill(cli.process.pid, signal.SIGTERM)
    begun = time.monotonic()
    status, _, err = cli.end()
    assert status == 143, err
    assert time.monotonic() - begun < 5
    line = one_line(err)
    assert f"saved in {run}" in line
    assert "--resume" in line
    assert cli.left() == {}
    saved = find_checkpoint(run)
    assert damage(saved) is None
    assert saved.about.step % SAVE_EVERY, "the test was meant to stop between two checkpoints"
    assert f"after update {saved.about.step} of {STEPS}" in line
    assert [row[0] for row in logged(run)] == list(range(saved.about.step))
    done = forge(cli.folder, *words_for("ddp", "--resume"), size=2)
    assert done.status == 0, done
    is_the_same_run(run, whole("ddp"), cli.folder)


def test_sigusr1_stops_within_seconds_where_steps_are_slow(cli: Cli) -> None:
    """Status 138. A step takes 0.3 s: the answer comes after the one in progress, and not after many."""
    (cli.folder / "mine.py").write_text(WORKLOAD)
    run = cli.folder / "run"
    cli.start(*words_for("fsdp", "--processes", "2"), SLEEP="0.075")
    cli.wait_for((cli.folder / "reached").exists)
    time.sleep(1.0)
    assert cli.process is not None
    os.kill(cli.process.pid, signal.SIGUSR1)
    begun = time.monotonic()
    status, _, err = cli.end()
    assert time.monotonic() - begun < 4
    assert status == 138, err
    assert "saved in" in one_line(err)
    assert cli.left() == {}
    saved = find_checkpoint(run)
    assert 1 <= saved.about.step <= 12
    assert damage(saved) is None


def test_a_second_sigterm_ends_at_once(cli: Cli) -> None:
    """Who cannot wait for a step of four seconds need not."""
    (cli.folder / "mine.py").write_text(WORKLOAD)
    cli.start(*words_for("ddp", "--processes", "2"), SLEEP="1")
    cli.wait_for((cli.folder / "reached").exists)
    assert cli.process is not None
    os.kill(cli.process.pid, signal.SIGTERM)
    time.sleep(0.3)
    os.kill(cli.process.pid, signal.SIGTERM)
    begun = time.monotonic()
    status, _, err = cli.end()
    assert time.monotonic() - begun < 3.5
    assert status == 143, err
    one_line(err)
    assert cli.left() == {}


# --- (3) started by torchrun


def rank_process(cli: Cli, rank: int) -> int | None:
    """The process of a rank that torchrun started, not its loader's."""
    for pid in sorted(cli.processes()):
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables:
                return pid
    return None


def test_under_torchrun_one_rank_that_is_asked_stops_all(cli: Cli) -> None:
    """Without --out all ranks write into one folder; SIGUSR1 to rank 1 alone ends all of them, with a checkpoint."""
    (cli.folder / "mine.py").write_text(WORKLOAD)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = ["train", "mine.py", "--layout", "fsdp", "--save-every", "5"]
    cli.start("-m", "everyrank", *words, command=torchrun, is_forked=False, SLEEP="0.03")
    cli.wait_for(lambda: any((cli.folder / "runs").glob("*/checkpoints/step-00000005")))
    pid = rank_process(cli, 1)
    assert pid is not None
    os.kill(pid, signal.SIGUSR1)
    begun = time.monotonic()
    status, _, err = cli.end()
    assert time.monotonic() - begun < 10
    assert status != 0
    assert "everyrank: stopped after update" in err
    assert cli.left() == {}
    (run,) = (cli.folder / "runs").iterdir()
    saved = find_checkpoint(run)
    assert saved.about.step < STEPS
    assert saved.about.world_size == 2
    assert damage(saved) is None
    assert {path.name for path in saved.path.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    assert [row[0] for row in logged(run)] == list(range(saved.about.step))


# --- one run of digits that is then used in every way


@pytest.fixture(scope="module")
def digits(everyrank: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """30 updates under ddp on two ranks, and what the command said. --resume finds nothing there, and begins."""
    folder = tmp_path_factory.mktemp("digits")
    words = "train digits --layout ddp --processes 2 --set width=4 --steps 30 --save-every 10 --keep 2"
    done = everyrank(folder, *words.split(), "--evaluate-every", "10", "--out", "run", "--resume")
    assert done.returncode == 0, done.stderr
    return folder / "run", done.stdout


WIDTH = ("--set", "width=4")


# --- (4) what cannot be gone on with


def test_nothing_to_go_on_from_is_said(digits: tuple[Path, str]) -> None:
    assert "nothing to go on from in run: beginning" in digits[1].splitlines()


def test_going_on_needs_a_place(capsys: pytest.CaptureFixture[str], digits: tuple[Path, str]) -> None:
    """Neither --resume without a place nor --out on top of another run is guessed at."""
    assert "--out DIR" in refused(capsys, "train", "digits", *WIDTH, "--resume")
    line = refused(capsys, "train", "digits", *WIDTH, "--out", digits[0])
    assert "it holds a run already" in line
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
    forge: Forge, digits: tuple[Path, str], tmp_path: Path, words: tuple[str, ...], expected: list[str]
) -> None:
    """Status 2, and the line names what differs; the run is as it was."""
    run = digits[0]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = forge(tmp_path, "train", "digits", *words, "--out", run, "--resume")
    assert done.status == 2, done
    line = one_line(done.err)
    for word in expected:
        assert word in line
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_another_workload_is_not_gone_on_with(forge: Forge, digits: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WORKLOAD)
    done = forge(tmp_path, "train", "mine.py", "--resume", digits[0])
    assert done.status == 2, done
    line = one_line(done.err)
    assert "digits" in line
    assert "mine" in line
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


# --- (5) evaluated, predicted, exported


@pytest.mark.parametrize(("layout", "size"), [("ddp", 2), ("single", 1), ("fsdp", 3), ("zero1", 4)])
def test_evaluating_says_what_training_said(
    forge: Forge, digits: tuple[Path, str], tmp_path: Path, layout: str, size: int
) -> None:
    """Under any layout: top1 to the last digit, and nothing is trained or written into the run."""
    run = digits[0]
    (trained,) = read_records(run / "record.json")
    before = sorted(run.rglob("*"))
    words = ("--evaluate", "--resume", run, "--layout", layout, "--json", "r.json")
    done = forge(tmp_path, "train", "digits", *WIDTH, *words, size=size)
    assert done.status == 0, done
    (record,) = read_records(tmp_path / "r.json")
    assert record.metrics["top1"] == trained.metrics["top1"]
    assert record.metrics["eval_loss"] == pytest.approx(trained.metrics["eval_loss"], rel=1e-6)
    assert record.world_size == size
    assert not record.loss
    assert sorted(run.rglob("*")) == before
    assert not (tmp_path / "runs").exists()


def test_predictions_are_in_the_order_of_the_data(forge: Forge, digits: tuple[Path, str], tmp_path: Path) -> None:
    """Identical on 1 to 4 ranks, a row for each held-out image; .npy says the same."""
    from everyrank.builtin.digits import Digits

    run = digits[0]
    (trained,) = read_records(run / "record.json")
    found: dict[int, list[dict[str, Any]]] = {}
    for size in (1, 2, 3, 4):
        layout = "single" if size == 1 else "ddp"
        words = ("--resume", run, "--layout", layout, "--out", f"p{size}.jsonl")
        done = forge(tmp_path, "predict", "digits", *WIDTH, *words, size=size)
        assert done.status == 0, done
        assert "359 predictions" in done.out
        found[size] = [json.loads(line) for line in (tmp_path / f"p{size}.jsonl").read_text().splitlines()]
        assert [row["index"] for row in found[size]] == list(range(359))
    words = ("--resume", run, "--layout", "fsdp", "--out", "p.npy")
    assert forge(tmp_path, "predict", "digits", *WIDTH, *words, size=2).status == 0
    assert found[1] == found[2] == found[3] == found[4]
    values = {size: np.array([row["prediction"] for row in rows]) for size, rows in found.items()}
    values[0] = np.load(tmp_path / "p.npy")
    assert np.array_equal(values[0], values[1])
    classes = values[1] if values[1].ndim == 1 else values[1].argmax(1)
    labels = Digits(held_out=True).tensors[1].numpy()
    assert float((classes == labels).mean()) == pytest.approx(trained.metrics["top1"], abs=1e-12)


def test_exported_weights_are_the_model(
    forge: Forge, digits: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
        done = forge(tmp_path, "train", "digits", *WIDTH, *words)
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


def test_weights_that_are_none_are_refused(forge: Forge, digits: tuple[Path, str], tmp_path: Path) -> None:
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
        done = forge(tmp_path, "train", "digits", *WIDTH, "--evaluate", "--pretrained", file)
        assert done.status == 2, (file, done)
        line = one_line(done.err)
        assert file in line
        assert word in line
        assert not mark.exists(), file


def test_hostile_weights_for_a_rank_that_we_start(cli: Cli) -> None:
    """The same line, and no other one, where the rank is a process of ours."""
    mark = cli.folder / "it-ran"
    torch.save({"weight": Hostile(mark)}, cli.folder / "hostile.pt")
    cli.start("train", "digits", *WIDTH, "--evaluate", "--pretrained", "hostile.pt")
    status, _, err = cli.end()
    assert status == 2, err
    assert "hostile.pt" in one_line(err)
    assert not mark.exists()


# --- (6) what a run leaves


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
    assert [one.about.step for one in there] == sorted({20, 30, best})
    assert [one.about.metrics for one in there] == [scores[one.about.step] for one in there]
    assert (run / "checkpoints" / "best").resolve().name == f"step-{best:08d}"
    assert f"{len(there)} checkpoints, the newest step-00000030" in said
    assert {path.name for path in run.iterdir() if path.is_file()} == {
        "log.jsonl", "log.csv", "events.jsonl", "epochs.csv", "record.json"
    }  # fmt: skip


# --- (7) trackers


def test_tensorboard_has_the_losses(forge: Forge, tmp_path: Path) -> None:
    """Every loss under the number of updates done; after going on, each of them once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = ("train", "digits", *WIDTH, "--out", "run", "--save-every", "4", "--tracker", "tensorboard")
    for more in (("--steps", "6"), ("--steps", "9", "--resume")):
        done = forge(tmp_path, *words, *more)
        assert done.status == 0, done
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006", ignore_errors=True)  # as if it had crashed
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    rows = logged(tmp_path / "run")
    losses = events.Scalars("loss")
    assert [one.step for one in losses] == list(range(1, 10))
    assert [one.value for one in losses] == pytest.approx([row[2] for row in rows], rel=1e-6)
    assert [one.step for one in events.Scalars("top1")][-1] == 9


def test_wandb_keeps_its_run_here(everyrank: Any, tmp_path: Path) -> None:
    """Offline it needs neither key nor network, and leaves its run in ours."""
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("logging to wandb is not verified: it is not installed")
    words = ("train", "digits", *WIDTH, "--steps", "3", "--save-every", "0", "--out", "run", "--tracker", "wandb")
    done = everyrank(tmp_path, *words, WANDB_MODE="offline", WANDB_SILENT="true")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    assert b"eval_loss" in file.read_bytes()


def test_a_tracker_nobody_knows(forge: Forge, tmp_path: Path) -> None:
    """Status 2, one line that names those there are; no folder of a run is left."""
    done = forge(tmp_path, "train", "digits", *WIDTH, "--steps", "3", "--tracker", "nonsense")
    assert done.status == 2, done
    line = one_line(done.err)
    assert "--tracker nonsense" in line
    assert "tensorboard, wandb" in line
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


# --- what must not be lost


LATE = """
import torch
from everyrank import Workload
from everyrank.errors import WorkloadError

class Late(torch.optim.SGD):
    done = 0
    def step(self, *_):
        self.done += 1
        if self.done == 9:
            raise WorkloadError("update 9 is one too many")
        return super().step()

workload = Workload(
    name="late", model=lambda: torch.nn.Linear(1, 1), train_data=lambda: [(torch.ones(1), torch.ones(1))] * 8,
    loss=lambda output, target: (((output - target) ** 2).sum(), len(target)),
    optimizer=lambda model: Late(model.parameters(), lr=0.1), global_batch=2, epochs=4)
"""


def test_a_run_that_fails_late_keeps_its_folder(forge: Forge, tmp_path: Path) -> None:
    """Nobody asked for it by --out, but two epochs of work and their checkpoints are in it."""
    (tmp_path / "late.py").write_text(LATE)
    done = forge(tmp_path, "train", "late.py")
    assert done.status == 2, done
    assert "update 9 is one too many" in done.err
    (run,) = (tmp_path / "runs").iterdir()
    assert [one.about.step for one in checkpoints_of(run)] == [4, 8]


def test_a_finished_run_is_not_begun_again(forge: Forge, tmp_path: Path) -> None:
    """It has no checkpoint to go on from, and its log and Record would be overwritten."""
    words = ("train", "digits", *WIDTH, "--steps", "2", "--save-every", "0", "--out", "run")
    assert forge(tmp_path, *words).status == 0
    log = (tmp_path / "run" / "log.jsonl").read_text()
    done = forge(tmp_path, *words, "--resume")
    assert done.status == 2
    assert "it holds a run already" in done.err
    assert (tmp_path / "run" / "log.jsonl").read_text() == log


def test_the_best_of_a_run_is_known_after_going_on(forge: Forge, tmp_path: Path) -> None:
    """The newest checkpoint is not the best; what is worse than that one does not take its place."""
    words = ("train", "digits", *WIDTH, "--save-every", "3", "--evaluate-every", "3", "--keep", "1", "--out", "run")
    assert forge(tmp_path, *words, "--steps", "6").status == 0
    run = tmp_path / "run"
    newest = find_checkpoint(run)
    metrics = newest.about.metrics | {"top1": 2.0}  # nothing can be better
    write_about(newest.path, dataclasses.replace(newest.about, metrics=metrics))
    assert forge(tmp_path, *words, "--steps", "12", "--resume").status == 0
    assert [one.about.step for one in checkpoints_of(run)] == [6, 12]
    assert (run / "checkpoints" / "best").resolve() == newest.path


def test_predictions_of_unequal_rows_are_refused(forge: Forge, tmp_path: Path) -> None:
    """Two ranks whose rows have other shapes cannot be put into one file; they must not be put in wrongly."""
    (tmp_path / "mine.py").write_text(
        WORKLOAD
        + "\nimport dataclasses\n"
        "workload = dataclasses.replace(workload, predict=lambda output: torch.zeros(len(output), 2 + RANK))\n".replace(
            "RANK", "int(__import__('os').environ['RANK'])"
        )
    )
    assert forge(tmp_path, *words_for("ddp", "--steps", "5"), size=2).status == 0
    done = forge(tmp_path, "predict", "mine.py", "--layout", "ddp", "--resume", "run", "--out", "p.npy", size=2)
    assert done.status == 2, done
    assert "rows of shape" in done.err
    assert not (tmp_path / "p.npy").exists()
    assert not list(tmp_path.glob("*.partial"))


def test_a_request_is_noted_and_a_second_sigterm_is_not() -> None:
    """SIGUSR1 as often as it comes; a SIGTERM after a request does what it did before."""
    from everyrank.launch import catch_signals

    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with catch_signals(signal.SIGTERM, signal.SIGUSR1) as stop:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.asked is signal.SIGUSR1
            assert seen == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


# --- (12) an output that cannot be written

UNSEEN = """\
import os
import sys

from everyrank.cli import main

if sys.argv[1] == "pipe":
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)
else:
    os.dup2(os.open(sys.argv[1], os.O_WRONLY), 1)
sys.stdout = open(1, "w", closefd=False)
main(sys.argv[2:])
"""


@pytest.mark.parametrize(("where", "said"), [("/dev/full", "No space left on device"), ("pipe", "its reader has gone")])
def test_a_training_that_nobody_can_see_comes_to_its_end(forge: Forge, tmp_path: Path, where: str, said: str) -> None:
    """`train ... | head -1` and a full disk behind `> file`: the checkpoints are there, and the status is 0."""
    (tmp_path / "unseen.py").write_text(UNSEEN)
    words = ("train", "digits", *WIDTH, "--save-every", "3", "--steps", "6", "--out", "run")
    done = forge(tmp_path, where, *words, script="unseen.py")
    assert done.status == 0, done
    assert done.err == f"standard output cannot be written ({said}); the training goes on\n"
    assert [one.about.step for one in checkpoints_of(tmp_path / "run")] == [3, 6]
    assert (tmp_path / "run" / "record.json").exists()


# --- (13) what goes wrong beside the updates

SPOILT = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset

from everyrank import Workload

data = lambda: TensorDataset(torch.linspace(0, 1, 48).reshape(16, 3), torch.linspace(1, 0, 32).reshape(16, 2))


def rises(output, target):
    raise ValueError("no such metric")


def derives(metrics):
    raise ValueError("nothing to derive")


def first_model():
    return nn.Linear(3, 2)


workload = Workload(
    name="spoilt",
    model=first_model,
    train_data=data,
    eval_data=data,
    loss=lambda output, target: (((output - target) ** 2).sum(), target.numel()),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=RATE),
    global_batch=4,
    epochs=2,
    MORE
)
"""


def spoilt(folder: Path, rate: str = "0.01", more: str = "") -> str:
    (folder / "spoilt.py").write_text(SPOILT.replace("RATE", rate).replace("MORE", more))
    return str(folder / "spoilt.py")


@pytest.mark.parametrize("more", ['metrics={"bad": rises}', 'derived={"bad": derives}'])
@pytest.mark.parametrize("words", [(), ("--save-async",)], ids=["at once", "async"])
def test_an_evaluation_that_raises_loses_no_epoch(
    forge: Forge, tmp_path: Path, more: str, words: tuple[str, ...]
) -> None:
    done = forge(tmp_path, "train", spoilt(tmp_path, more=more), *words, "--out", "run", "--device", "cpu")
    assert done.status in (2, 4), done
    assert "spoilt.py" in done.err.splitlines()[-1]
    (one,) = checkpoints_of(tmp_path / "run")
    assert (one.about.step, one.about.metrics, damage(one)) == (4, {}, None)


@pytest.mark.parametrize("words", [(), ("--save-async",)], ids=["at once", "async"])
def test_a_checkpoint_learns_how_good_it_is(forge: Forge, tmp_path: Path, words: tuple[str, ...]) -> None:
    """It was saved before it was evaluated."""
    done = forge(tmp_path, "train", spoilt(tmp_path), *words, "--out", "run", "--device", "cpu")
    assert done.status == 0, done
    there = checkpoints_of(tmp_path / "run")
    assert [(one.about.step, list(one.about.metrics), damage(one)) for one in there] == [
        (4, ["eval_loss"], None),
        (8, ["eval_loss"], None),
    ]
    assert (tmp_path / "run" / "checkpoints" / "best").resolve() == there[-1].path.resolve()


@pytest.mark.parametrize("words", [(), ("--evaluate-every", "1")], ids=["at the end", "within"])
def test_what_the_last_update_spoils_is_not_saved(forge: Forge, tmp_path: Path, words: tuple[str, ...]) -> None:
    """No loss shows it any more: the parameters do."""
    workload = spoilt(tmp_path, rate="1e999")
    done = forge(tmp_path, "train", workload, "--steps", "1", *words, "--out", "run", "--device", "cpu")
    assert done.status == 4, done
    assert "update 0: it made parameter weight infinite or NaN; lower the learning rate" in done.err
    assert not checkpoints_of(tmp_path / "run")
    assert not (tmp_path / "run" / "record.json").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight": torch.ones(2, 3, dtype=torch.complex64)}, "weight is torch.complex64, the model's torch.float32"),
        ({"weight": torch.ones(2, 3, dtype=torch.int64)}, "weight is torch.int64, the model's torch.float32"),
        ({"bias": torch.ones(2, dtype=torch.bool)}, "bias is torch.bool, the model's torch.float32"),
        ({"bias": torch.tensor([1.0, float("nan")])}, "bias has numbers that are NaN or infinite"),
    ],
    ids=["complex", "whole", "bool", "nan"],
)
def test_weights_of_other_numbers_are_refused(
    forge: Forge, tmp_path: Path, change: dict[str, torch.Tensor], said: str
) -> None:
    """A cast would drop what they mean; the file is named, and no update blamed."""
    torch.save({"weight": torch.ones(2, 3), "bias": torch.zeros(2)} | change, tmp_path / "w.pt")
    done = forge(tmp_path, "train", spoilt(tmp_path), "--pretrained", "w.pt", "--out", "run", "--device", "cpu")
    assert done.status == 2, done
    assert f"w.pt: {said}" in one_line(done.err)
    torch.save({"weight": torch.ones(2, 3).half(), "bias": torch.zeros(2).double()}, tmp_path / "w.pt")
    words = ("--pretrained", "w.pt", "--out", "again", "--device", "cpu")
    assert forge(tmp_path, "train", spoilt(tmp_path), *words).status == 0


COMPLEX = """
def first_model():
    model = nn.Linear(3, 2)
    model.register_PART("turns", MADE)
    return model
"""


@pytest.mark.parametrize(
    ("part", "made"),
    [("parameter", "nn.Parameter(torch.ones(2, dtype=torch.complex64))"), ("buffer", "torch.ones(2) * 1j")],
)
def test_a_model_of_complex_numbers_is_refused(forge: Forge, tmp_path: Path, part: str, made: str) -> None:
    """They were made real without a word."""
    workload = Path(spoilt(tmp_path))
    model = COMPLEX.replace("PART", part).replace("MADE", made)
    workload.write_text(workload.read_text().replace("\nworkload =", model + "\nworkload ="))
    done = forge(tmp_path, "train", workload, "--device", "cpu")
    assert done.status == 2, done
    assert "turns of the model is torch.complex64; keep it as two real numbers" in one_line(done.err)


def test_a_model_that_is_no_number_from_the_start(forge: Forge, tmp_path: Path) -> None:
    """No update before the first one is blamed."""
    workload = Path(spoilt(tmp_path, more="clip_norm=1.0,"))
    model = "    model = nn.Linear(3, 2)\n    nn.init.constant_(model.weight, float('nan'))\n    return model"
    workload.write_text(workload.read_text().replace("    return nn.Linear(3, 2)", model))
    done = forge(tmp_path, "train", workload, "--device", "cpu")
    assert done.status == 4, done
    assert "parameter weight" in done.err
    assert "update before" not in done.err


# --- (14) folders that are not as we left them


def one_epoch(forge: Forge, folder: Path, *words: str) -> Path:
    done = forge(folder, "train", spoilt(folder), "--epochs", "1", "--out", "run", "--device", "cpu", *words)
    assert done.status == 0, done
    return folder / "run"


def goes_on(forge: Forge, folder: Path, *words: str) -> str:
    done = forge(folder, "train", spoilt(folder), "--out", "run", "--device", "cpu", "--resume", *words)
    assert done.status == 0, done
    return done.out


def test_links_in_a_foreign_folder_are_not_written_through(forge: Forge, tmp_path: Path) -> None:
    """What they lead to is as it was, and the training goes on."""
    run = one_epoch(forge, tmp_path)
    (tmp_path / "outside").mkdir()
    mine = tmp_path / "mine"
    mine.write_text("mine")
    names = ["log.jsonl", "log.csv", "events.jsonl", "epochs.csv"]
    for name in [*(f"{name}.partial" for name in names), *names[1:2], "record.json", "checkpoints/best.tmp"]:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(mine)
    (run / "checkpoints" / "step-00000008.tmp").symlink_to(tmp_path / "outside")
    goes_on(forge, tmp_path)
    assert mine.read_text() == "mine"
    assert not list((tmp_path / "outside").iterdir())
    assert [(one.about.step, damage(one)) for one in checkpoints_of(run)] == [(4, None), (8, None)]
    assert len(read_records(run / "record.json")[0].loss) == 8


@pytest.mark.parametrize("place", ["", "run", "run/checkpoints/best", "run/checkpoints/step-00000004"])
def test_checkpoints_may_be_on_another_disk(forge: Forge, tmp_path: Path, place: str) -> None:
    """A link to a folder with more room."""
    run = one_epoch(forge, tmp_path)
    (run / "checkpoints").rename(tmp_path / "scratch")
    (run / "checkpoints").symlink_to(tmp_path / "scratch")
    assert "going on after update 4 of 8" in goes_on(forge, tmp_path, *([place] if place else []))
    assert sorted(path.name for path in (tmp_path / "scratch").glob("step-*")) == ["step-00000004", "step-00000008"]
    assert len(logged(run)) == 8


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00\n" * 3,
        b"[1]\n{}\n",
        b'{"step": 1, "loss": "x", "epoch": 0, "terms": 8}\n{}\n',
        b"[" * 99999 + b"\n1\n",
    ],
    ids=["binary", "other rows", "other types", "deep"],
)
@pytest.mark.parametrize("name", ["log.jsonl", "events.jsonl"])
def test_a_damaged_log_is_set_aside(forge: Forge, tmp_path: Path, name: str, content: bytes) -> None:
    run = one_epoch(forge, tmp_path)
    rows = (run / name).read_bytes()
    (run / name).write_bytes(content + rows)
    assert f"{name}: not all of its lines can be read" in goes_on(forge, tmp_path)
    assert (run / f"{name}.damaged").read_bytes() == content + rows
    assert [row[0] for row in logged(run)] == list(range(8))


def test_a_log_that_is_a_pipe(forge: Forge, tmp_path: Path) -> None:
    """It is not waited for."""
    run = one_epoch(forge, tmp_path)
    (run / "log.jsonl").unlink()
    os.mkfifo(run / "log.jsonl")
    goes_on(forge, tmp_path)
    assert [row[0] for row in logged(run)] == list(range(4, 8))


def test_a_folder_that_is_taken_away_is_said(forge: Forge, tmp_path: Path) -> None:
    """Status 4, and no word of files that are not there; what was saved later is whole."""
    workload = Path(spoilt(tmp_path, more="metrics={'gone': take_away},"))
    take = "import shutil\n\n\ndef take_away(output, target):\n    shutil.rmtree('run', ignore_errors=True)\n"
    take += "    return (0.0 * output).sum(), len(target)\n"
    workload.write_text(workload.read_text().replace("\nworkload =", take + "\n\nworkload ="))
    done = forge(tmp_path, "train", workload, "--out", "run", "--device", "cpu")
    assert done.status == 4, done
    assert "log.jsonl, events.jsonl, log.csv, epochs.csv were taken away while the training ran" in done.err
    assert "wrote" not in done.out
