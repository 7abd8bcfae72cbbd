"""Checkpoints on a full disk. The disk is a tmpfs of 8 MiB."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from everyrank.runs import checkpoints_of, damage, find_checkpoint
from forkserver import ForkServer, run_python
from processes import Cli, only_error_line

TRAINING_SCRIPT = """\
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from everyrank import Workload

calls = 0
BALLAST = Path(os.environ["DISK"]) / "ballast"


def train_data():
    return TensorDataset(torch.linspace(0, 1, 48).reshape(16, 3), torch.linspace(1, 0, 32).reshape(16, 2))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4000), nn.Linear(4000, 2))


def loss(output, target):
    global calls
    calls += 1
    if calls == 5 and torch.distributed.get_rank() == 0:
        while not (BALLAST.parent / "run" / "checkpoints" / "step-00000004").exists():
            time.sleep(0.01)  # rank 0 may still be writing it
        free = os.statvfs(BALLAST.parent)
        BALLAST.write_bytes(bytes(free.f_bavail * free.f_frsize - int(os.environ["LEFT"])))
    if calls == 9 and torch.distributed.get_rank() == 0 and os.environ["CLEARED"] == "1":
        BALLAST.unlink()
    return ((output - target) ** 2).sum(), target.numel()


workload = Workload(
    name="mine",
    model=model,
    train_data=train_data,
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9),
    global_batch=4,
    steps=12,
)
"""


@pytest.fixture(scope="module")
def needs_small_disk(python: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip the test where a small tmpfs cannot be mounted."""
    reason = "a disk that is full is not verified for real"
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip(f"{reason}: needs Linux, root and mount")
    folder = tmp_path_factory.mktemp("disk")
    with (folder / "mount.log").open("w") as log:
        if python.fork(mount_small_disk, folder, streams=(None, log, log)).wait(60):
            pytest.skip(f"{reason}: {(folder / 'mount.log').read_text().splitlines()[-1]}")


def mount_small_disk(disk: Path) -> None:
    """Mount a tmpfs of 8 MiB in a mount namespace of this process and its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000):  # CLONE_NEWNS; os.unshare comes with Python 3.12
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], check=True)


def train_on_small_disk(disk: Path, copy_folder: Path, args: list[str]) -> None:
    """Train with the run on a small disk. Copy the run to `copy_folder`, which is outside the mount namespace."""
    mount_small_disk(disk)
    try:
        run_python(["-m", "everyrank", "train", "mine.py", "--out", str(disk / "run"), "--save-every", "2", *args])
    finally:
        (disk / "ballast").unlink(missing_ok=True)
        shutil.copytree(disk / "run", copy_folder, symlinks=True)


@dataclasses.dataclass
class CommandResult:
    """The exit status and the output of a command."""

    returncode: int
    stdout: str
    stderr: str


def train_on_full_disk(
    python: ForkServer, folder: Path, *args: str, is_cleared_later: bool, free_bytes: int
) -> CommandResult:
    """Train with the run on a disk of 8 MiB that is full from update 5 on.

    `free_bytes` stay free. If `is_cleared_later`, the disk has free space again at update 9.
    """
    (folder / "mine.py").write_text(TRAINING_SCRIPT)
    (folder / "disk").mkdir()
    variables = {
        "DISK": str(folder / "disk"),
        "LEFT": str(free_bytes),
        "CLEARED": str(int(is_cleared_later)),
        "OMP_NUM_THREADS": "1",
    }
    train_arguments = (folder / "disk", folder / "kept", list(args))
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = python.fork(
            train_on_small_disk,
            *train_arguments,
            folder=folder,
            environment={**os.environ, **variables},
            streams=(None, out, err),
        )
    return CommandResult(process.wait(200), (folder / "out").read_text(), (folder / "err").read_text())


def logged_steps(run: Path) -> list[int]:
    """Return the step numbers in the log of a run."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "step" in row]


def test_training_continues_after_checkpoints_that_did_not_fit_on_the_disk(
    python: ForkServer, needs_small_disk: None, tmp_path: Path
) -> None:
    """It prints one line for each failed checkpoint and saves again once the disk has free space."""
    result = train_on_full_disk(python, tmp_path, "--keep", "9", is_cleared_later=True, free_bytes=60_000)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    lines = [line for line in result.stdout.splitlines() if "could not be saved" in line]
    assert len(lines) == 2, result.stdout  # after the updates 6 and 8
    for line in lines:
        assert "No space left on device" in line
        assert "step-00000004" in line
        assert "the training continues" in line
    checkpoints = checkpoints_of(tmp_path / "kept")
    assert [checkpoint.metadata.step for checkpoint in checkpoints] == [2, 4, 10, 12]
    assert [damage(checkpoint) for checkpoint in checkpoints] == [None] * 4
    assert logged_steps(tmp_path / "kept") == list(range(12))
    assert not list((tmp_path / "kept" / "checkpoints").glob("*.tmp"))


def test_run_fails_if_its_last_checkpoint_does_not_fit_on_the_disk(
    python: ForkServer, cli: Cli, needs_small_disk: None, tmp_path: Path
) -> None:
    """The run exits with status 4 and prints one line. The checkpoint before is intact and can be resumed."""
    layout_args = ("--layout", "ddp", "--processes", "2")
    result = train_on_full_disk(python, tmp_path, *layout_args, is_cleared_later=False, free_bytes=60_000)
    assert result.returncode == 4, result.stdout + result.stderr
    line = only_error_line(result.stderr)
    assert "No space left on device" in line
    assert "step-00000004" in line
    checkpoints = checkpoints_of(tmp_path / "kept")
    assert [checkpoint.metadata.step for checkpoint in checkpoints] == [2, 4]
    assert [damage(checkpoint) for checkpoint in checkpoints] == [None] * 2
    resume_args = ("--out", "kept", "--resume", "--steps", "8", "--save-every", "2")
    resumed = cli(tmp_path, "train", "mine.py", *layout_args, *resume_args, DISK=str(tmp_path), LEFT="0", CLEARED="0")
    assert resumed.status == 0, resumed.err
    assert logged_steps(tmp_path / "kept") == list(range(8))
    assert find_checkpoint(tmp_path / "kept").metadata.step == 8


def test_run_fails_with_one_line_if_the_log_does_not_fit_on_the_disk(
    python: ForkServer, needs_small_disk: None, tmp_path: Path
) -> None:
    """No byte is left on the disk. The earlier checkpoints are intact."""
    result = train_on_full_disk(python, tmp_path, is_cleared_later=False, free_bytes=0)
    assert result.returncode == 4, result.stdout + result.stderr
    assert "No space left on device" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    # the last page of the log may have space for a traceback
    assert len([line for line in result.stderr.splitlines() if not line.startswith("full traceback: ")]) == 1, (
        result.stderr
    )
    checkpoints = checkpoints_of(tmp_path / "kept")
    assert [checkpoint.metadata.step for checkpoint in checkpoints] == [2, 4]
    assert [damage(checkpoint) for checkpoint in checkpoints] == [None] * 2
