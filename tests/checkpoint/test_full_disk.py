"""A disk that is full, for real."""

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
from processes import Cli, one_line

FULL = """\
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
def small_disks(python: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where no small disk can be made."""
    reason = "a disk that is full is not verified for real"
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip(f"{reason}: needs Linux, root and mount")
    folder = tmp_path_factory.mktemp("disk")
    with (folder / "said").open("w") as said:
        if python.fork(mount_small_disk, folder, streams=(None, said, said)).wait(60):
            pytest.skip(f"{reason}: {(folder / 'said').read_text().splitlines()[-1]}")


def mount_small_disk(disk: Path) -> None:
    """8 MiB, in a mount namespace of this process and its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000):  # CLONE_NEWNS; os.unshare comes with Python 3.12
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], check=True)


def train_on_small_disk(disk: Path, kept: Path, words: list[str]) -> None:
    """What is on the disk in the end is copied to `kept`, where everybody sees it."""
    mount_small_disk(disk)
    try:
        run_python(["-m", "everyrank", "train", "mine.py", "--out", str(disk / "run"), "--save-every", "2", *words])
    finally:
        (disk / "ballast").unlink(missing_ok=True)
        shutil.copytree(disk / "run", kept, symlinks=True)


@dataclasses.dataclass
class Ended:
    """How it ended, and what was said."""

    returncode: int
    stdout: str
    stderr: str


def on_a_full_disk(python: ForkServer, folder: Path, *words: str, cleared: bool, left: int) -> Ended:
    """Train with the run on a disk of 8 MiB that is full from update 5 on."""
    (folder / "mine.py").write_text(FULL)
    (folder / "disk").mkdir()
    own = {"DISK": str(folder / "disk"), "LEFT": str(left), "CLEARED": str(int(cleared)), "OMP_NUM_THREADS": "1"}
    arguments = (folder / "disk", folder / "kept", list(words))
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        started = python.fork(
            train_on_small_disk,
            *arguments,
            folder=folder,
            environment={**os.environ, **own},
            streams=(None, out, err),
        )
    return Ended(started.wait(200), (folder / "out").read_text(), (folder / "err").read_text())


def steps_logged(run: Path) -> list[int]:
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "step" in row]


def test_a_full_disk_while_training(python: ForkServer, small_disks: None, tmp_path: Path) -> None:
    """One clear line for each checkpoint that could not be saved; the training goes on, and saves when it can."""
    done = on_a_full_disk(python, tmp_path, "--keep", "9", cleared=True, left=60_000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = [line for line in done.stdout.splitlines() if "could not be saved" in line]
    assert len(lines) == 2, done.stdout  # after the updates 6 and 8
    for line in lines:
        assert "No space left on device" in line
        assert "step-00000004" in line
        assert "the training continues" in line
    there = checkpoints_of(tmp_path / "kept")
    assert [one.metadata.step for one in there] == [2, 4, 10, 12]
    assert [damage(one) for one in there] == [None] * 4
    assert steps_logged(tmp_path / "kept") == list(range(12))
    assert not list((tmp_path / "kept" / "checkpoints").glob("*.tmp"))


def test_a_full_disk_at_the_end(python: ForkServer, cli: Cli, small_disks: None, tmp_path: Path) -> None:
    """The last checkpoint is what the run was for: status 4, one line; the one before is whole and goes on."""
    two = ("--layout", "ddp", "--processes", "2")
    done = on_a_full_disk(python, tmp_path, *two, cleared=False, left=60_000)
    assert done.returncode == 4, done.stdout + done.stderr
    line = one_line(done.stderr)
    assert "No space left on device" in line
    assert "step-00000004" in line
    there = checkpoints_of(tmp_path / "kept")
    assert [one.metadata.step for one in there] == [2, 4]
    assert [damage(one) for one in there] == [None] * 2
    words = ("--out", "kept", "--resume", "--steps", "8", "--save-every", "2")
    again = cli(tmp_path, "train", "mine.py", *two, *words, DISK=str(tmp_path), LEFT="0", CLEARED="0")
    assert again.status == 0, again.err
    assert steps_logged(tmp_path / "kept") == list(range(8))
    assert find_checkpoint(tmp_path / "kept").metadata.step == 8


def test_a_disk_with_no_room_for_the_log_either(python: ForkServer, small_disks: None, tmp_path: Path) -> None:
    """Not one byte is left: however it ends, in one line, and what was saved is whole."""
    done = on_a_full_disk(python, tmp_path, cleared=False, left=0)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "No space left on device" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    # the last page of the log may have room for a traceback
    assert len([line for line in done.stderr.splitlines() if not line.startswith("full traceback: ")]) == 1, done.stderr
    there = checkpoints_of(tmp_path / "kept")
    assert [one.metadata.step for one in there] == [2, 4]
    assert [damage(one) for one in there] == [None] * 2
