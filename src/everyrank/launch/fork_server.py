"""One import of torch for all ranks of a host: the process that has done it forks them.

`python -P -m everyrank.launch.fork_server DIRECTORY FIRST COUNT`

It lives as long as its job, in a session with all of its ranks, so that one signal to its group ends them all, and has
the environment and the streams that a rank started by itself would have. Nothing of a person's is imported here: not
their script, not their modules. What is imported starts no threads and leaves CUDA alone, or the ranks could not use
what they inherit; where there are threads after all, each rank is started as a process of its own.

Not multiprocessing's fork server: that one imports the main module again in each child, and outlives the job.
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
from everyrank.launch.supervisor import write_whole

__all__ = ["main"]

_GRACE_SECONDS = 3.0  # after the first failure, for the others to say what they saw
_STARTED: list[subprocess.Popen[bytes]] = []


def main() -> int:
    """0 when all ranks ended well; else the status of the first supervisor that did not."""
    directory, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    places = [(first + local, local, count) for local in range(count)]
    start = _fork if _is_ready_to_fork(directory) else _start
    supervisors = {start(directory, place): place[0] for place in places}
    return _wait(supervisors, directory)


def _is_ready_to_fork(directory: Path) -> bool:
    """Import what the ranks need; whether a fork of this process is as good as a process of its own."""
    gc.disable()  # an import makes no garbage worth the search
    try:
        job: Job = pickle.loads((directory / "job.pickle").read_bytes())  # noqa: S301  (our own parent wrote it)
        sys.path[:] = job.sys_path
        importlib.import_module(job.preload)
    except Exception:  # each rank says it in its own words, as it would have
        return False
    # the first fork is a trial: libraries that keep threads and know of forks end theirs (OpenBLAS)
    with warnings.catch_warnings(action="ignore"):  # Python's own, of threads
        child = os.fork()
    if child == 0:
        os._exit(_cuda_is_lost())
    is_lost = os.waitpid(child, 0)[1] != 0
    gc.freeze()  # what is here is shared by all ranks as long as nobody writes to it
    return not is_lost and len(list(Path("/proc/self/task").iterdir())) == 1


def _cuda_is_lost() -> bool:
    """Whether torch cannot use CUDA in this fork, because the process that forked it has asked the driver something."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda._is_in_bad_fork()


def _fork(directory: Path, place: tuple[int, int, int]) -> int:
    """A fork that goes on as the worker of one rank; its process number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        gc.enable()
        if (random := sys.modules.get("numpy.random")) is not None:
            random.seed()  # from the system, as in a process of its own; Python sees to its own `random` in a fork
        sys.argv = [worker.__file__, str(directory), *map(str, place)]
        status = worker.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _start(directory: Path, place: tuple[int, int, int]) -> int:
    process = subprocess.Popen([*WORKER, str(directory), *map(str, place)])
    _STARTED.append(process)  # dropped, another Popen would wait for it in our place
    return process.pid


def _wait(supervisors: dict[int, int], directory: Path) -> int:
    """Wait for all; some seconds after the first that fails this process ends, and with it the others."""

    def pass_on(number: int, _: FrameType | None) -> None:
        for pid in list(supervisors):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, pass_on)
    failed = 0
    while supervisors:
        pid, status = os.wait()
        code, rank = os.waitstatus_to_exitcode(status), supervisors.pop(pid, None)
        if code < 0 and rank is not None:  # a supervisor that was killed has written nothing
            with contextlib.suppress(OSError):
                write_whole(directory / f"rank{rank}.exit", json.dumps(exit_row(rank, code)).encode())
        if code and rank is not None and not failed:
            failed = 128 - code if code < 0 else code
            ending = threading.Timer(_GRACE_SECONDS, os._exit, (failed,))
            ending.daemon = True
            ending.start()
    return failed


if __name__ == "__main__":
    os._exit(main())  # torch's own goodbye takes longer than it is worth
