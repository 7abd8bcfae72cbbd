"""A run that is killed or stopped by a signal and then resumed is bitwise identical to an uninterrupted run."""

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
from processes import Cli, RunningCommand, only_error_line, wait_for_marked_processes
from resuming import WORKLOAD, logged_updates, read_csv, train_args

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="looking for left processes needs Linux's /proc"
)

STEPS, SAVE_EVERY = 30, 5

# --- killed and resumed


@pytest.fixture(scope="module")
def uninterrupted_run(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains with a layout on two ranks and returns the run folder."""
    runs: dict[str, Path] = {}

    def train(layout: str) -> Path:
        if layout not in runs:
            folder = tmp_path_factory.mktemp(layout)
            (folder / "mine.py").write_text(WORKLOAD)
            result = cli.on_ranks(folder, *train_args(layout), size=2)
            assert result.status == 0, result
            runs[layout] = folder / "run"
        return runs[layout]

    return train


def weights_of(run: Path, export_path: Path) -> dict[str, torch.Tensor]:
    """Export the weights of a run to a file, and return them."""
    assert main(["checkpoint", "export", str(run), str(export_path)]) == 0
    return torch.load(export_path, weights_only=True)


def assert_same_run(run: Path, expected: Path, folder: Path) -> None:
    """Assert that both runs have every update once, with bitwise identical losses and weights."""
    rows = logged_updates(run)
    assert [row[0] for row in rows] == list(range(STEPS))
    assert rows == logged_updates(expected)
    columns = ("step", "epoch", "loss", "lr", "terms")
    run_table, expected_table = read_csv(run / "log.csv"), read_csv(expected / "log.csv")
    assert [[row[name] for name in columns] for row in run_table] == [
        [row[name] for name in columns] for row in expected_table
    ]
    run_table, expected_table = read_csv(run / "epochs.csv"), read_csv(expected / "epochs.csv")
    assert [row["epoch"] for row in run_table] == ["0", "1", "2", "3", "4"]
    assert [float(row["loss"]) for row in run_table] == pytest.approx(
        [float(row["loss"]) for row in expected_table], rel=1e-12
    )
    assert [row["eval_loss"] for row in run_table] == [row["eval_loss"] for row in expected_table]
    (record,), (expected_record,) = read_records(run / "record.json"), read_records(expected / "record.json")
    assert record.loss == expected_record.loss
    assert record.metrics == expected_record.metrics
    assert find_checkpoint(run).metadata.step == STEPS
    weights, expected_weights = weights_of(run, folder / "one.pt"), weights_of(expected, folder / "other.pt")
    assert weights.keys() == expected_weights.keys()
    for name, value in weights.items():
        assert torch.equal(value, expected_weights[name]), name


def first_checkpoint(run: Path) -> Callable[[], bool]:
    """Return a function that tells whether the first checkpoint exists."""
    return lambda: (run / "checkpoints" / f"step-{SAVE_EVERY:08d}").exists()


@pytest.mark.parametrize(
    ("layout", "args"),
    [
        pytest.param("ddp", ["--workers", "1"], id="ddp"),
        pytest.param("zero1", ["--save-async"], id="zero1", marks=pytest.mark.integration),
        pytest.param("fsdp", [], id="fsdp", marks=pytest.mark.integration),
    ],
)
def test_killed_run_resumes_bitwise_identically(
    cli: Cli, tmp_path: Path, uninterrupted_run: Callable[[str], Path], layout: str, args: list[str]
) -> None:
    """All processes get SIGKILL at a random moment. The same command with --resume completes the run."""
    (tmp_path / "mine.py").write_text(WORKLOAD)
    run = tmp_path / "run"
    running = cli.start(tmp_path, *train_args(layout, "--processes", "2", *args), SLEEP="0.01")
    running.wait_for(first_checkpoint(run))
    pause = random.Random(layout).uniform(0.0, 0.6)
    time.sleep(pause)
    killed = [psutil.Process(pid) for pid in running.processes()]
    for process in killed:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with its parent process
            process.kill()
    assert psutil.wait_procs(killed, timeout=60)[1] == []  # the lock is released after the memory and the environment
    assert running.remaining_processes() == {}
    for checkpoint in checkpoints_of(run):
        assert damage(checkpoint) is None
    assert find_checkpoint(run).metadata.step < STEPS, f"killed too late, after {pause} s"
    assert not (run / "record.json").exists()
    if layout == "ddp":
        running = cli.start(tmp_path, *train_args(layout, "--processes", "2", *args, "--resume"))
        status, out, err = running.end()
    else:
        status, out, err = cli.on_ranks(tmp_path, *train_args(layout, *args, "--resume"), size=2)
        status = max(status)
    assert status == 0, err
    assert "resuming after update" in out
    assert_same_run(run, uninterrupted_run(layout), tmp_path)


SLOW_WORKER_START = """

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


def test_loader_workers_that_start_while_ranks_are_killed_end(cli: Cli, tmp_path: Path) -> None:
    """torch compares a worker's parent with the parent at its start. A late worker would wait forever."""
    (tmp_path / "mine.py").write_text(WORKLOAD + SLOW_WORKER_START)
    running = cli.start(tmp_path, *train_args("ddp", "--processes", "2", "--workers", "1"))
    running.wait_for(lambda: len(list(tmp_path.glob("worker*"))) == 2)
    worker_pids = [int(path.name.removeprefix("worker")) for path in tmp_path.glob("worker*")]
    for pid in running.processes().keys() - worker_pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert wait_for_marked_processes(running.mark, 30.0) == {}


def test_resume_from_an_older_checkpoint_needs_a_new_folder(
    cli: Cli, uninterrupted_run: Callable[[str], Path], tmp_path: Path
) -> None:
    """A resume from an older checkpoint needs a new folder. In the same folder later updates would be lost."""
    (tmp_path / "mine.py").write_text(WORKLOAD)
    result = cli.on_ranks(tmp_path, *train_args("ddp", "--steps", "20"), size=2)
    assert result.status == 0, result
    older_checkpoint = tmp_path / "run" / "checkpoints" / "step-00000010"
    args = train_args("ddp", "--steps", "15", "--resume", str(older_checkpoint))
    result = cli.on_ranks(tmp_path, *args, size=2)
    assert result.status == 2
    assert "another --out" in result.err
    assert [row[0] for row in logged_updates(tmp_path / "run")] == list(range(20))
    result = cli.on_ranks(tmp_path, *args, "--out", "other", size=2)
    assert result.status == 0, result
    assert [row[0] for row in logged_updates(tmp_path / "other")] == list(range(15))
    result = cli.on_ranks(tmp_path, *train_args("ddp", "--resume", "--out", "other"), size=2)
    assert result.status == 0, result
    assert_same_run(tmp_path / "other", uninterrupted_run("ddp"), tmp_path)


# --- stopped by a signal


def test_sigterm_saves_a_checkpoint_and_prints_how_to_resume(
    cli: Cli, tmp_path: Path, uninterrupted_run: Callable[[str], Path]
) -> None:
    """The exit code is 143. The update in progress is completed and saved, and no process is left.

    The printed --resume completes the same run.
    """
    (tmp_path / "mine.py").write_text(WORKLOAD)
    run = tmp_path / "run"
    save_every = 12  # the next checkpoint is seconds away when the signal comes, even on a busy machine
    running = cli.start(
        tmp_path,
        *train_args("ddp", "--processes", "2", "--workers", "1", "--save-every", str(save_every)),
        SLEEP="0.06",
    )
    running.wait_for((run / "checkpoints" / f"step-{save_every:08d}").exists)
    assert running.process is not None
    os.kill(running.process.pid, signal.SIGTERM)
    signal_time = time.monotonic()
    status, _, err = running.end()
    assert status == 143, err
    assert time.monotonic() - signal_time < 5
    error_line = only_error_line(err)
    assert f"saved in {run}" in error_line
    assert "--resume" in error_line
    assert running.remaining_processes() == {}
    checkpoint = find_checkpoint(run)
    assert damage(checkpoint) is None
    assert checkpoint.metadata.step % save_every, "the test was meant to stop between two checkpoints"
    assert f"after update {checkpoint.metadata.step} of {STEPS}" in error_line
    assert [row[0] for row in logged_updates(run)] == list(range(checkpoint.metadata.step))
    result = cli.on_ranks(tmp_path, *train_args("ddp", "--resume"), size=2)
    assert result.status == 0, result
    assert_same_run(run, uninterrupted_run("ddp"), tmp_path)


def test_sigusr1_stops_after_the_step_in_progress(cli: Cli, tmp_path: Path) -> None:
    """The exit code is 138. A step takes 0.3 s, and only the step in progress is completed."""
    (tmp_path / "mine.py").write_text(WORKLOAD)
    run = tmp_path / "run"
    running = cli.start(tmp_path, *train_args("fsdp", "--processes", "2"), SLEEP="0.075")
    running.wait_for((tmp_path / "reached").exists)
    time.sleep(1.0)
    assert running.process is not None
    os.kill(running.process.pid, signal.SIGUSR1)
    signal_time = time.monotonic()
    status, _, err = running.end()
    assert time.monotonic() - signal_time < 4
    assert status == 138, err
    assert "saved in" in only_error_line(err)
    assert running.remaining_processes() == {}
    checkpoint = find_checkpoint(run)
    assert 1 <= checkpoint.metadata.step <= 12
    assert damage(checkpoint) is None


def test_second_sigterm_stops_immediately(cli: Cli, tmp_path: Path) -> None:
    """A step takes four seconds. The second signal does not wait for it."""
    (tmp_path / "mine.py").write_text(WORKLOAD)
    running = cli.start(tmp_path, *train_args("ddp", "--processes", "2"), SLEEP="1")
    running.wait_for((tmp_path / "reached").exists)
    assert running.process is not None
    os.kill(running.process.pid, signal.SIGTERM)
    time.sleep(0.3)
    os.kill(running.process.pid, signal.SIGTERM)
    signal_time = time.monotonic()
    status, _, err = running.end()
    assert time.monotonic() - signal_time < 3.5
    assert status == 143, err
    only_error_line(err)
    assert running.remaining_processes() == {}


# --- started by torchrun


def rank_process(running: RunningCommand, rank: int) -> int | None:
    """Return the process of a rank that torchrun started, not a loader worker."""
    for pid in sorted(running.processes()):
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables:
                return pid
    return None


@pytest.mark.integration
def test_sigusr1_to_one_rank_stops_all_ranks_under_torchrun(cli: Cli, tmp_path: Path) -> None:
    """Only rank 1 gets SIGUSR1. All ranks stop with a checkpoint.

    Without --out all ranks write into one folder.
    """
    (tmp_path / "mine.py").write_text(WORKLOAD)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    args = ["train", "mine.py", "--layout", "fsdp", "--save-every", "5"]
    running = cli.start(tmp_path, "-m", "everyrank", *args, command=torchrun, is_forked=False, SLEEP="0.03")
    running.wait_for(lambda: any((tmp_path / "runs").glob("*/checkpoints/step-00000005")))
    pid = rank_process(running, 1)
    assert pid is not None
    os.kill(pid, signal.SIGUSR1)
    signal_time = time.monotonic()
    status, _, err = running.end()
    assert time.monotonic() - signal_time < 10
    assert status != 0
    assert "everyrank: stopped after update" in err
    assert running.remaining_processes() == {}
    (run,) = (tmp_path / "runs").iterdir()
    checkpoint = find_checkpoint(run)
    assert checkpoint.metadata.step < STEPS
    assert checkpoint.metadata.world_size == 2
    assert damage(checkpoint) is None
    assert {path.name for path in checkpoint.path.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    assert [row[0] for row in logged_updates(run)] == list(range(checkpoint.metadata.step))
