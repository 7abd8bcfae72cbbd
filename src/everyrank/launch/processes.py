"""Function in, results by rank out: in processes that are started here, or in this one where it is a rank itself.

Results and errors come back through files in a directory that only this user can open.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import resource
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from everyrank.errors import (
    CannotRunError,
    EveryrankError,
    RankFailedError,
    StoppedError,
    UsageError,
    describe,
    printable,
)
from everyrank.launch import mpi, ray, slurm
from everyrank.launch.environments import facts_from_environment, threads_asked
from everyrank.launch.facts import RankFacts
from everyrank.launch.hosts import check_known, check_port, check_reachable, host_name, process_space, split_endpoint
from everyrank.launch.job import Job, Launch
from everyrank.launch.ranks import Ranks
from everyrank.launch.stop import Stop

__all__ = ["run"]

_FILES_OF_A_RANK, _FILES_OF_A_WORKER = 32, 4  # with fewer, loader workers and their rank wait for each other for ever


def run(
    launch: Launch,
    function: Callable[..., Any],
    *arguments: Any,
    stop: Stop | None = None,
    kept: dict[int, Any] | None = None,
) -> dict[int, Any]:
    """Call `function(facts, *arguments)` in every rank; its results by rank, of those that were started from here.

    Functions of a notebook or a script are sent by value. Where this process was itself started as a rank (by
    torchrun, mpirun or srun), the function is called here and the result is that of this rank alone. When `stop` is
    asked, the ranks are: they get SIGUSR1 until they end by themselves; where this is the rank, the function gets
    `stop` at the end. `kept` gets what each rank has left by `facts.keep`, however the call ends.

    Raises the error of the rank that failed first, labelled with it; the other ranks are ended within five seconds.
    """
    facts = facts_from_environment(os.environ)
    if facts is not None:
        keep = functools.partial(kept.__setitem__, facts.rank) if kept is not None else None
        facts = dataclasses.replace(facts, keep=keep)
        return {facts.rank: _call_here(facts, function, (*arguments, stop) if stop is not None else arguments)}
    _check(launch)
    make_folder = _shared_folder if launch.launcher in ("slurm", "mpi") else _temporary_folder
    directory = make_folder("everyrank-")
    logs = launch.logs or make_folder("everyrank-logs-")
    keep_logs = launch.logs is not None
    try:
        logs.mkdir(parents=True, exist_ok=True)
        job = Job(
            cloudpickle.dumps((function, arguments)),
            list(sys.path),
            launch.launcher,
            launch.processes,
            _rendezvous(launch, directory),
            process_space(),
            os.getpid(),
            logs.absolute(),
            keep_logs,
            threads_asked(os.environ),
        )
        (directory / "job.pickle").write_bytes(pickle.dumps(job))
        with Ranks(launch, directory, logs, stop) as ranks:
            ranks.wait()
            return ranks.results()
    except EveryrankError as error:
        keep_logs = keep_logs or error.log is not None
        raise
    finally:
        if kept is not None:
            for path in directory.glob("rank*.kept"):
                kept[int(path.stem.removeprefix("rank"))] = pickle.loads(path.read_bytes())  # noqa: S301
        shutil.rmtree(directory, ignore_errors=True)
        if not keep_logs:
            shutil.rmtree(logs, ignore_errors=True)


def _check(launch: Launch) -> None:
    """Whether this launch can be tried here. Raises `UsageError` or `CannotRunError`."""
    if launch.launcher == "slurm":
        if "SLURM_JOB_ID" not in os.environ:
            raise UsageError(
                "--launcher slurm: there is no allocation (SLURM_JOB_ID is not set); salloc first, or sbatch"
            )
        slurm.check_allocation(launch, os.environ)
        slurm.require("srun")
    elif launch.launcher == "mpi":
        mpi.require()
    elif launch.launcher == "ray":
        ray.require()
    _check_files(launch.loader_workers)
    method = launch.init_method
    if isinstance(method, str) and method.startswith("tcp://") and launch.launcher != "slurm":
        host, port = split_endpoint(method.removeprefix("tcp://"), "--init-method tcp://")
        check_known(host, "--init-method")
        check_port(host, port)
    if launch.nodes > 1 and launch.rendezvous is not None:
        check_reachable(split_endpoint(launch.rendezvous, "--rendezvous")[0], "--rendezvous")


def _check_files(workers: int) -> None:
    """Whether a rank may open as many files as its loader workers take. Raises `UsageError`."""
    files, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _FILES_OF_A_RANK + _FILES_OF_A_WORKER * workers
    if workers and files != resource.RLIM_INFINITY and files < needed:
        raise UsageError(
            f"--workers {workers}: a process may open {files} files here, and a rank with so many workers needs "
            f"{needed}: ulimit -n {max(1024, needed)}, or --workers 0"
        )


def _rendezvous(launch: Launch, directory: Path) -> str | None:
    """Where the ranks meet unless an init method was asked for; None where torchrun tells them."""
    if launch.launcher == "torchrun" or launch.per_node == "torchrun":
        return None
    if launch.rendezvous is not None:
        return f"tcp://{launch.rendezvous}"
    if launch.launcher == "spawn":
        return (directory / "rendezvous").absolute().as_uri()  # a file: no port is opened, and none can collide
    return "meet://" + (directory / "address").absolute().as_uri().removeprefix("file://")


def _call_here(facts: RankFacts, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call it in this rank, which somebody else started; an error of its own gets a label and a log."""

    def fail(error: BaseException) -> None:
        print(
            f"everyrank: rank {facts.rank} of {facts.size} on {host_name()}: {printable(str(error))}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(getattr(error, "exit_status", EveryrankError.exit_status))

    try:
        return function(dataclasses.replace(facts, fail=fail), *arguments)
    except (UsageError, StoppedError):
        raise
    except Exception as error:
        logs = _temporary_folder("everyrank-logs-")
        log = logs / f"rank{facts.rank}.log"
        log.write_text("".join(traceback.format_exception(error)))
        kind = type(error) if isinstance(error, EveryrankError) else RankFailedError
        raise kind(f"rank {facts.rank} of {facts.size} on {host_name()}: {describe(error)}", log) from error


def _shared_folder(prefix: str) -> Path:
    """A folder for a job whose ranks may be on several hosts: below the home directory, which clusters share."""
    place = Path.home() / ".cache" / "everyrank" / "jobs"
    try:
        place.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    except OSError as error:
        raise CannotRunError(f"no folder for the job: {error}; it has to be on storage that all hosts share") from error


def _temporary_folder(prefix: str) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise CannotRunError(
            f"no folder for temporary files: {error}; set TMPDIR to one that can be written"
        ) from error
