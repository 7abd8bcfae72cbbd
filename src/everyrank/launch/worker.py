"""What runs inside each started process: take the job, call its function, hand back the result or the error.

`python -m everyrank.launch.worker DIRECTORY [RANK]`; without RANK the facts are in the environment. The directory
was made by our own parent with access for this user alone, which is why its pickles are read.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from everyrank.errors import EveryrankError, WorkloadError, describe
from everyrank.launch.facts import RankFacts, facts_from_environment
from everyrank.launch.job import Job

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
        return 1  # the parent was interrupted while it started us, and has tidied up
    sys.path[:] = job.sys_path
    facts = _facts(job, directory)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a request to stop, for a function that listens for it
    (directory / f"rank{facts.rank}.pid").write_text(str(os.getpid()))
    _end_with(job.parent_pid)
    if facts.rank != 0:
        _write_to(job.logs / f"rank{facts.rank}.log")
    try:
        result = job.function()(facts, *job.arguments())
        _write(directory / f"rank{facts.rank}.result", pickle.dumps(result))
    except BaseException as error:
        report_error(error, facts, directory, job.logs)
        status = 1
    else:
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  (removes multiprocessing's temporary folders)
        status = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _facts(job: Job, directory: Path) -> RankFacts:
    if len(sys.argv) > 2:
        rank = int(sys.argv[2])
        meeting = (directory / "rendezvous").absolute().as_uri()
        return RankFacts(rank, rank, job.processes, job.processes, "spawn", meeting)
    facts = facts_from_environment(os.environ)
    assert facts is not None, "torchrun sets the environment of its processes"
    return facts


def _end_with(parent_pid: int) -> None:
    """End this process as soon as whoever started it, or the person's own process, is gone."""
    starter = os.getppid()

    def watch() -> None:
        while os.getppid() == starter and _is_alive(parent_pid):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="everyrank-parent-watch").start()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _write_to(log: Path) -> None:
    """Send all output of this process to its log, that of C++ libraries too: rank 0 alone has the screen."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)


def report_error(error: BaseException, facts: RankFacts, directory: Path, logs: Path) -> None:
    """Leave the error where the parent finds it, and its frames in this rank's log."""
    with contextlib.suppress(OSError), (logs / f"rank{facts.rank}.log").open("a") as log:  # the disk may be full
        log.write("".join(traceback.format_exception(error)))
    row = {
        "rank": facts.rank,
        "kind": type(error).__name__ if isinstance(error, EveryrankError) else "",
        "message": describe(error),
        # only code that is not ours has frames worth reading
        "has_frames": not isinstance(error, EveryrankError)
        or (isinstance(error, WorkloadError) and error.__cause__ is not None),
        "time": time.time(),
    }
    _write(directory / f"rank{facts.rank}.error", json.dumps(row).encode())


def _write(path: Path, content: bytes) -> None:
    """Write whole or not at all."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_bytes(content)
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
