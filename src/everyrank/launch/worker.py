"""The program of each rank process: read the job, call its function, and write the result or the error.

`python -P -m everyrank.launch.worker JOB_FOLDER [RANK LOCAL_RANK LOCAL_WORLD_SIZE]`

Without numbers, they are read from the environment. Unpickling is safe: only this user can open the job folder, which
the parent process created.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from everyrank.errors import EveryrankError, UsageError, WorkloadError, describe
from everyrank.launch.autopsy import FOLDER, current_state, keep_state, last_words
from everyrank.launch.environments import rank_info_from_environment
from everyrank.launch.host_info import host_name, pid_namespace
from everyrank.launch.job import Job
from everyrank.launch.rank_info import RankInfo
from everyrank.launch.supervisor import supervise, write_whole

__all__ = ["main"]


def main() -> int:
    """Run one rank. The process exits with status 0 after writing its result, with 1 after writing its error.

    It skips the interpreter's shutdown. Threads of a process group that wait for another rank would block it, and a
    thread of gloo that releases a tensor during it aborts the process ("terminate called ...").
    """
    directory = Path(sys.argv[1])
    try:
        job: Job = pickle.loads((directory / "job.pickle").read_bytes())  # noqa: S301
    except FileNotFoundError:
        # The parent was interrupted while it started this process, and has deleted the folder; or this host does not
        # share the storage, and the message goes to the launcher's log.
        if len(sys.argv) == 2:
            print(f"everyrank: {host_name()} has no {directory}: all hosts must share that folder", file=sys.stderr)
        return 1
    sys.path[:] = job.sys_path
    try:
        info = _rank_info(job)
    except UsageError as error:
        report_error(error, RankInfo(0, 0, 1, 1, job.launcher, ""), directory, job.logs)
        return 1
    _delete_old_files(directory, info)
    supervise(job, info.rank, directory)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a request to stop, for functions that handle it
    with contextlib.suppress(OSError):  # its process group is that of its supervisor
        write_whole(directory / f"rank{info.rank}.pid", _process_ids(job).encode())
    _open_log(info, job.logs / f"rank{info.rank}.log")
    keep_state(job.logs / FOLDER, info.rank, info.size, job.name, job.is_name_unique)
    status = _call(job, info, directory)
    _flush()
    os._exit(status)


def _call(job: Job, info: RankInfo, directory: Path) -> int:
    """Call the job's function, and write its result or error to the job folder. Returns the exit status."""

    def fail(error: BaseException) -> None:
        report_error(error, info, directory, job.logs)
        os._exit(1)

    def keep(value: Any) -> None:
        with contextlib.suppress(OSError):  # the disk may be full
            write_whole(directory / f"rank{info.rank}.kept", pickle.dumps(value))

    try:
        result = job.function()(dataclasses.replace(info, fail=fail, keep=keep), *job.arguments())
        write_whole(directory / f"rank{info.rank}.result", pickle.dumps(result))
    except BaseException as error:
        report_error(error, info, directory, job.logs)
        return 1
    if (state := current_state()) is not None:
        state.end()
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  (deletes multiprocessing's temporary folders)
    return 0


def _rank_info(job: Job) -> RankInfo:
    if len(sys.argv) > 2:
        rank, local_rank, local_size = map(int, sys.argv[2:5])
        info = RankInfo(rank, local_rank, job.processes, local_size, job.launcher, job.rendezvous_url or "")
    else:
        environment_info = rank_info_from_environment(os.environ)
        assert environment_info is not None, f"{job.launcher} sets the environment of its processes"
        info = dataclasses.replace(environment_info, started_by=job.launcher)
    if job.rendezvous_url is not None:
        info = dataclasses.replace(info, rendezvous_url=job.rendezvous_url, is_store_master=info.rank == 0)
    return dataclasses.replace(info, threads=job.threads)  # OMP_NUM_THREADS here may be set by everyrank


def _delete_old_files(directory: Path, info: RankInfo) -> None:
    """Delete files of the previous start, after an elastic launcher has restarted its ranks.

    This local rank may have been a different rank then. Its old error would look like the first one, and its old
    process number like a running process.
    """
    rank_file = directory / f"place-{host_name()}-{info.local_rank}"
    ranks: dict[int, tuple[str, ...]] = {info.rank: ("error", "exit", "result", "kept")}
    with contextlib.suppress(OSError, ValueError):
        ranks[int(rank_file.read_text())] = ("error", "exit", "result", "kept", "pid")
    for rank, kinds in ranks.items():
        for kind in kinds:
            (directory / f"rank{rank}.{kind}").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        write_whole(rank_file, str(info.rank).encode())


def _process_ids(job: Job) -> str:
    """Process number and group, for a parent on the same machine; "" for a parent on a different one."""
    return f"{os.getpid()} {os.getpgrp()}" if pid_namespace() == job.pid_namespace else ""


def _open_log(info: RankInfo, log: Path) -> None:
    """Redirect the output of this process, including C++ libraries, to its log. Only rank 0 keeps the terminal."""
    with contextlib.suppress(OSError), log.open("a") as file:
        file.write(f"# rank {info.rank} of {info.size} on {host_name()}, process {os.getpid()}\n")
    if info.rank == 0:
        return
    _flush()
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:  # a folder that this host does not share
        file = os.open(os.devnull, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a workload may have replaced or closed it
            stream.flush()


def report_error(error: BaseException, info: RankInfo, directory: Path, logs: Path) -> None:
    """Write the error to the job folder for the parent, and its traceback to this rank's log."""
    with contextlib.suppress(OSError), (logs / f"rank{info.rank}.log").open("a") as log:  # the disk may be full
        log.write("".join(traceback.format_exception(error)))
    row = {
        "rank": info.rank,
        "host": host_name(),
        "kind": type(error).__name__ if isinstance(error, EveryrankError) else "",
        "message": describe(error),
        # only tracebacks through user code are worth reading
        "has_frames": not isinstance(error, EveryrankError)
        or (isinstance(error, WorkloadError) and error.__cause__ is not None),
        "time": time.time(),
        "autopsy": last_words(error),
        "is_started": (state := current_state()) is None or state.is_started,
    }
    with contextlib.suppress(OSError):  # the disk is full, or the folder is gone; the exit status remains
        write_whole(directory / f"rank{info.rank}.error", json.dumps(row).encode())


if __name__ == "__main__":
    sys.exit(main())
