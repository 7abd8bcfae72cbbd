"""What runs inside each started process: take the job, call its function, hand back the result or the error.

`python -P -m everyrank.launch.worker DIRECTORY [RANK LOCAL_RANK LOCAL_SIZE]`; without a place, it is in the
environment. The directory was made by our own parent with access for this user alone, which is why its pickles are
read.
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
    """Run the job of one rank; the process ends with status 0 when its result is written, with 1 when its error is.

    It ends without the interpreter's own goodbye: threads of a process group that wait for another rank would keep
    that from coming, and one of gloo's that lets go of a tensor during it aborts the process ("terminate called ...").
    """
    directory = Path(sys.argv[1])
    try:
        job: Job = pickle.loads((directory / "job.pickle").read_bytes())  # noqa: S301
    except FileNotFoundError:
        # the parent was interrupted while it started us, and has tidied up; or this host does not share its storage,
        # which is then read in the launcher's log
        if len(sys.argv) == 2:
            print(f"everyrank: {host_name()} has no {directory}: hosts have to share that folder", file=sys.stderr)
        return 1
    sys.path[:] = job.sys_path
    try:
        info = _rank_info(job)
    except UsageError as error:
        report_error(error, RankInfo(0, 0, 1, 1, job.launcher, ""), directory, job.logs)
        return 1
    _clear_earlier(directory, info)
    supervise(job, info.rank, directory)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a request to stop, for a function that listens for it
    with contextlib.suppress(OSError):  # its group is that of its supervisor
        write_whole(directory / f"rank{info.rank}.pid", _where_to_signal(job).encode())
    _open_log(info, job.logs / f"rank{info.rank}.log")
    keep_state(job.logs / FOLDER, info.rank, info.size, directory.name)
    status = _call(job, info, directory)
    _flush()
    os._exit(status)


def _call(job: Job, info: RankInfo, directory: Path) -> int:
    """Call the job's function, and leave its result, or its error, in the job's folder; the exit status."""

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
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  (removes multiprocessing's temporary folders)
    return 0


def _rank_info(job: Job) -> RankInfo:
    if len(sys.argv) > 2:
        rank, local_rank, local_size = map(int, sys.argv[2:5])
        info = RankInfo(rank, local_rank, job.processes, local_size, job.launcher, job.rendezvous_url or "")
    else:
        found = rank_info_from_environment(os.environ)
        assert found is not None, f"{job.launcher} sets the environment of its processes"
        info = dataclasses.replace(found, started_by=job.launcher)
    if job.rendezvous_url is not None:
        info = dataclasses.replace(info, rendezvous_url=job.rendezvous_url, is_store_master=info.rank == 0)
    return dataclasses.replace(info, threads=job.threads)  # what is in the environment here may be ours


def _clear_earlier(directory: Path, info: RankInfo) -> None:
    """Take away what the start before has left, where an elastic launcher starts its ranks again.

    This place of the host may have had another rank then: its error would be taken for the first, and its process
    number for a process of ours.
    """
    place = directory / f"place-{host_name()}-{info.local_rank}"
    ranks: dict[int, tuple[str, ...]] = {info.rank: ("error", "exit", "result", "kept")}
    with contextlib.suppress(OSError, ValueError):
        ranks[int(place.read_text())] = ("error", "exit", "result", "kept", "pid")
    for rank, kinds in ranks.items():
        for kind in kinds:
            (directory / f"rank{rank}.{kind}").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        write_whole(place, str(info.rank).encode())


def _where_to_signal(job: Job) -> str:
    """Process and group, for a parent on the same machine; nothing for one elsewhere."""
    return f"{os.getpid()} {os.getpgrp()}" if pid_namespace() == job.pid_namespace else ""


def _open_log(info: RankInfo, log: Path) -> None:
    """Send all output of this process to its log, that of C++ libraries too: rank 0 alone has the screen."""
    with contextlib.suppress(OSError), log.open("a") as file:
        file.write(f"# rank {info.rank} of {info.size} on {host_name()}, process {os.getpid()}\n")
    if info.rank == 0:
        return
    _flush()
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:  # a folder that other hosts do not share
        file = os.open(os.devnull, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a workload may have put anything there, or nothing
            stream.flush()


def report_error(error: BaseException, info: RankInfo, directory: Path, logs: Path) -> None:
    """Leave the error where the parent finds it, and its frames in this rank's log."""
    with contextlib.suppress(OSError), (logs / f"rank{info.rank}.log").open("a") as log:  # the disk may be full
        log.write("".join(traceback.format_exception(error)))
    row = {
        "rank": info.rank,
        "host": host_name(),
        "kind": type(error).__name__ if isinstance(error, EveryrankError) else "",
        "message": describe(error),
        # only code that is not ours has frames worth reading
        "has_frames": not isinstance(error, EveryrankError)
        or (isinstance(error, WorkloadError) and error.__cause__ is not None),
        "time": time.time(),
        "autopsy": last_words(error),
        "is_started": (state := current_state()) is None or state.is_started,
    }
    with contextlib.suppress(OSError):  # the disk is full, or the folder is gone: the exit status is what is left
        write_whole(directory / f"rank{info.rank}.error", json.dumps(row).encode())


if __name__ == "__main__":
    sys.exit(main())
