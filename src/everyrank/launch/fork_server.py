"""The fork server: imports torch once and forks all ranks of a host.

`python -P -m everyrank.launch.fork_server JOB_FOLDER FIRST_RANK COUNT`

It runs until its job ends, in one session with its ranks, so that one signal to its process group ends them all. Ranks
inherit the environment and streams that they would have without it. It imports torch, or the module of the ranks'
function if this was given as "module:function". Imports should start no threads and not initialize CUDA, because a fork
could not use either. If there are threads after all, each rank is started as a separate process.

multiprocessing's fork server does not fit: it imports the main module again in each child, and outlives the job.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from pathlib import Path
from types import FrameType

from everyrank.launch import worker
from everyrank.launch.job import WORKER, Job
from everyrank.launch.reports import exit_row
from everyrank.launch.signals import is_end_requested
from everyrank.launch.supervisor import write_whole

__all__ = ["main"]

_GRACE_SECONDS = 3.0  # after the first failure, so that other ranks can report theirs
_PROCESSES: list[subprocess.Popen[bytes]] = []


def main(is_checked: bool = False) -> int:
    """Run all ranks of this host. Returns 0 if all succeeded, else the status of the first process that failed.

    `is_checked`: this process was forked from one that has imported all modules.
    """
    directory, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    numbers = [(first + local_rank, local_rank, count) for local_rank in range(count)]
    start = _fork if is_checked or _import_and_check(directory) else _start
    supervisors = {start(directory, row): row[0] for row in numbers}
    return _wait(supervisors, directory)


def _import_and_check(directory: Path) -> bool:
    """Import the modules that ranks need. Returns whether a fork of this process works like a new process."""
    gc.disable()  # imports create little garbage
    try:
        job: Job = pickle.loads((directory / "job.pickle").read_bytes())  # noqa: S301  (our own parent wrote it)
        sys.path[:] = job.sys_path
        importlib.import_module(job.preload)
    except Exception:  # each rank will report the same error
        return False
    # Fork once before the threads are counted: OpenBLAS ends its own at a fork.
    with warnings.catch_warnings(action="ignore"):  # Python warns about threads
        child = os.fork()
    if child == 0:
        os._exit(_is_cuda_unusable())
    is_unusable = os.waitpid(child, 0)[1] != 0
    gc.freeze()  # keep this memory shared between ranks: the collector would write to it
    return not is_unusable and len(list(Path("/proc/self/task").iterdir())) == 1


def _is_cuda_unusable() -> bool:
    """Whether torch cannot use CUDA in this fork, because its parent has already called the driver."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda._is_in_bad_fork()


def _fork(directory: Path, numbers: tuple[int, int, int]) -> int:
    """Fork a process that continues as the worker of one rank. Returns its process number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        gc.enable()
        if (random := sys.modules.get("numpy.random")) is not None:
            random.seed()  # from the system, as in a new process; Python itself reseeds `random` after a fork
        sys.argv = [worker.__file__, str(directory), *map(str, numbers)]
        status = worker.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _start(directory: Path, numbers: tuple[int, int, int]) -> int:
    process = subprocess.Popen([*WORKER, str(directory), *map(str, numbers)])
    _PROCESSES.append(process)  # a later Popen would reap the child of one that is garbage-collected
    return process.pid


def _wait(supervisors: dict[int, int], directory: Path) -> int:
    """Wait for all ranks. Some seconds after the first failure this process exits, which ends the others."""

    def forward(number: int, _: FrameType | None) -> None:
        for pid in list(supervisors):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, forward)
    failed = 0
    while supervisors:
        pid, status = os.wait()
        code, rank = os.waitstatus_to_exitcode(status), supervisors.pop(pid, None)
        if code < 0 and rank is not None:  # a supervisor that was killed has written no file
            with contextlib.suppress(OSError):
                write_whole(directory / f"rank{rank}.exit", json.dumps(exit_row(rank, code)).encode())
        if code and rank is not None and not failed:
            failed = 128 - code if code < 0 else code
            if is_end_requested(directory):  # ranks that were asked to stop may end in any way
                continue
            timer = threading.Timer(_GRACE_SECONDS, os._exit, (failed,))
            timer.daemon = True
            timer.start()
    return failed


if __name__ == "__main__":
    os._exit(main())  # skip torch's slow shutdown
