"""Killed, or stopped by a signal, and gone on with: the same run, to the last bit."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from everyrank.cli import main
from everyrank.record import read_records
from everyrank.runs import checkpoints_of, damage, find_checkpoint
from processes import Cli, Running, left_of, one_line
from resuming import WORKLOAD, logged, table, words_for

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="looking for left processes needs Linux's /proc"
)

STEPS, SAVE_EVERY = 30, 5

# --- killed, and gone on with


@pytest.fixture(scope="module")
def whole(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run under a layout on two ranks that nothing happened to."""
    made: dict[str, Path] = {}

    def run(layout: str) -> Path:
        if layout not in made:
            folder = tmp_path_factory.mktemp(layout)
            (folder / "mine.py").write_text(WORKLOAD)
            done = cli.on_ranks(folder, *words_for(layout), size=2)
            assert done.status == 0, done
            made[layout] = folder / "run"
        return made[layout]

    return run


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
    assert find_checkpoint(run).metadata.step == STEPS
    weights, others = weights_of(run, folder / "one.pt"), weights_of(expected, folder / "other.pt")
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        assert torch.equal(value, others[name]), name


def first_checkpoint(run: Path) -> Callable[[], bool]:
    return lambda: (run / "checkpoints" / f"step-{SAVE_EVERY:08d}").exists()


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        pytest.param("ddp", ["--workers", "1"], id="ddp"),
        pytest.param("zero1", ["--save-async"], id="zero1", marks=pytest.mark.integration),
        pytest.param("fsdp", [], id="fsdp", marks=pytest.mark.integration),
    ],
)
def test_a_run_that_is_killed_goes_on_to_the_last_bit(
    cli: Cli, tmp_path: Path, whole: Callable[[str], Path], layout: str, more: list[str]
) -> None:
    """SIGKILL to all its processes at a random moment; the same command with --resume makes the same run of it."""
    (tmp_path / "mine.py").write_text(WORKLOAD)
    run = tmp_path / "run"
    running = cli.start(tmp_path, *words_for(layout, "--processes", "2", *more), SLEEP="0.01")
    running.wait_for(first_checkpoint(run))
    pause = random.Random(layout).uniform(0.0, 0.6)
    time.sleep(pause)
    killed = [psutil.Process(pid) for pid in running.processes()]
    for process in killed:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with the one that started it
            process.kill()
    assert psutil.wait_procs(killed, timeout=60)[1] == []  # the lock is let go after the memory, and with it the mark
    assert running.left() == {}
    for one in checkpoints_of(run):
        assert damage(one) is None
    assert find_checkpoint(run).metadata.step < STEPS, f"killed too late, after {pause} s"
    assert not (run / "record.json").exists()
    if layout == "ddp":
        running = cli.start(tmp_path, *words_for(layout, "--processes", "2", *more, "--resume"))
        status, out, err = running.end()
    else:
        status, out, err = cli.on_ranks(tmp_path, *words_for(layout, *more, "--resume"), size=2)
        status = max(status)
    assert status == 0, err
    assert "resuming after update" in out
    is_the_same_run(run, whole(layout), tmp_path)


LATE_WORKERS = """

from torch.utils.data._utils import signal_handling

begin = signal_handling._set_worker_signal_handlers


def late():
    rank_process = os.getppid()
    Path(f"worker{os.getpid()}").touch()
    while os.getppid() == rank_process:
        time.sleep(0.01)
    begin()


signal_handling._set_worker_signal_handlers = late
"""


def test_workers_that_begin_while_their_ranks_are_killed_end(cli: Cli, tmp_path: Path) -> None:
    """torch compares the parent with the one there was when the worker began: it would wait for work for ever."""
    (tmp_path / "mine.py").write_text(WORKLOAD + LATE_WORKERS)
    running = cli.start(tmp_path, *words_for("ddp", "--processes", "2", "--workers", "1"))
    running.wait_for(lambda: len(list(tmp_path.glob("worker*"))) == 2)
    workers = [int(path.name.removeprefix("worker")) for path in tmp_path.glob("worker*")]
    for process in running.processes().keys() - workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    assert left_of(running.mark, 30.0) == {}


def test_a_run_that_goes_on_from_an_older_checkpoint(cli: Cli, whole: Callable[[str], Path], tmp_path: Path) -> None:
    """Beside the run, in a folder of its own: in the same one, what came after it would be lost, or mixed up."""
    (tmp_path / "mine.py").write_text(WORKLOAD)
    done = cli.on_ranks(tmp_path, *words_for("ddp", "--steps", "20"), size=2)
    assert done.status == 0, done
    older = tmp_path / "run" / "checkpoints" / "step-00000010"
    words = words_for("ddp", "--steps", "15", "--resume", str(older))
    done = cli.on_ranks(tmp_path, *words, size=2)
    assert done.status == 2
    assert "another --out" in done.err
    assert [row[0] for row in logged(tmp_path / "run")] == list(range(20))
    done = cli.on_ranks(tmp_path, *words, "--out", "other", size=2)
    assert done.status == 0, done
    assert [row[0] for row in logged(tmp_path / "other")] == list(range(15))
    done = cli.on_ranks(tmp_path, *words_for("ddp", "--resume", "--out", "other"), size=2)
    assert done.status == 0, done
    is_the_same_run(tmp_path / "other", whole("ddp"), tmp_path)


# --- stopped by a signal


def test_sigterm_saves_and_says_how_to_go_on(cli: Cli, tmp_path: Path, whole: Callable[[str], Path]) -> None:
    """Status 143; the update in progress is done and saved, no rank is left, and --resume makes the same run of it."""
    (tmp_path / "mine.py").write_text(WORKLOAD)
    run = tmp_path / "run"
    every = 12  # so that the next one is seconds away when the signal comes, whatever else runs here
    running = cli.start(
        tmp_path, *words_for("ddp", "--processes", "2", "--workers", "1", "--save-every", str(every)), SLEEP="0.06"
    )
    running.wait_for((run / "checkpoints" / f"step-{every:08d}").exists)
    assert running.process is not None
    os.kill(running.process.pid, signal.SIGTERM)
    begun = time.monotonic()
    status, _, err = running.end()
    assert status == 143, err
    assert time.monotonic() - begun < 5
    line = one_line(err)
    assert f"saved in {run}" in line
    assert "--resume" in line
    assert running.left() == {}
    saved = find_checkpoint(run)
    assert damage(saved) is None
    assert saved.metadata.step % every, "the test was meant to stop between two checkpoints"
    assert f"after update {saved.metadata.step} of {STEPS}" in line
    assert [row[0] for row in logged(run)] == list(range(saved.metadata.step))
    done = cli.on_ranks(tmp_path, *words_for("ddp", "--resume"), size=2)
    assert done.status == 0, done
    is_the_same_run(run, whole("ddp"), tmp_path)


def test_sigusr1_stops_within_seconds_where_steps_are_slow(cli: Cli, tmp_path: Path) -> None:
    """Status 138. A step takes 0.3 s: the answer comes after the one in progress, and not after many."""
    (tmp_path / "mine.py").write_text(WORKLOAD)
    run = tmp_path / "run"
    running = cli.start(tmp_path, *words_for("fsdp", "--processes", "2"), SLEEP="0.075")
    running.wait_for((tmp_path / "reached").exists)
    time.sleep(1.0)
    assert running.process is not None
    os.kill(running.process.pid, signal.SIGUSR1)
    begun = time.monotonic()
    status, _, err = running.end()
    assert time.monotonic() - begun < 4
    assert status == 138, err
    assert "saved in" in one_line(err)
    assert running.left() == {}
    saved = find_checkpoint(run)
    assert 1 <= saved.metadata.step <= 12
    assert damage(saved) is None


def test_a_second_sigterm_ends_at_once(cli: Cli, tmp_path: Path) -> None:
    """Who cannot wait for a step of four seconds need not."""
    (tmp_path / "mine.py").write_text(WORKLOAD)
    running = cli.start(tmp_path, *words_for("ddp", "--processes", "2"), SLEEP="1")
    running.wait_for((tmp_path / "reached").exists)
    assert running.process is not None
    os.kill(running.process.pid, signal.SIGTERM)
    time.sleep(0.3)
    os.kill(running.process.pid, signal.SIGTERM)
    begun = time.monotonic()
    status, _, err = running.end()
    assert time.monotonic() - begun < 3.5
    assert status == 143, err
    one_line(err)
    assert running.left() == {}


# --- started by torchrun


def rank_process(running: Running, rank: int) -> int | None:
    """The process of a rank that torchrun started, not its loader's."""
    for pid in sorted(running.processes()):
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables:
                return pid
    return None


@pytest.mark.integration
def test_under_torchrun_one_rank_that_is_asked_stops_all(cli: Cli, tmp_path: Path) -> None:
    """Without --out all ranks write into one folder; SIGUSR1 to rank 1 alone ends all of them, with a checkpoint."""
    (tmp_path / "mine.py").write_text(WORKLOAD)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = ["train", "mine.py", "--layout", "fsdp", "--save-every", "5"]
    running = cli.start(tmp_path, "-m", "everyrank", *words, command=torchrun, is_forked=False, SLEEP="0.03")
    running.wait_for(lambda: any((tmp_path / "runs").glob("*/checkpoints/step-00000005")))
    pid = rank_process(running, 1)
    assert pid is not None
    os.kill(pid, signal.SIGUSR1)
    begun = time.monotonic()
    status, _, err = running.end()
    assert time.monotonic() - begun < 10
    assert status != 0
    assert "everyrank: stopped after update" in err
    assert running.left() == {}
    (run,) = (tmp_path / "runs").iterdir()
    saved = find_checkpoint(run)
    assert saved.metadata.step < STEPS
    assert saved.metadata.world_size == 2
    assert damage(saved) is None
    assert {path.name for path in saved.path.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    assert [row[0] for row in logged(run)] == list(range(saved.metadata.step))
