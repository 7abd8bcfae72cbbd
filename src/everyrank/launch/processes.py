"""Function in, results by rank out: in processes that are started here, or in this one where it is a rank itself.

Results and errors come back through files in a directory that only this user can open.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pickle
import resource
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator
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
from everyrank.launch.autopsy import last_words
from everyrank.launch.environments import rank_info_from_environment, threads_asked
from everyrank.launch.host_info import (
    check_known,
    check_port,
    check_reachable,
    host_name,
    pid_namespace,
    split_endpoint,
)
from everyrank.launch.job import Job, Launch, named_function
from everyrank.launch.launcher import BatchLauncher
from everyrank.launch.monitor import ProcessMonitor
from everyrank.launch.rank_info import RankInfo
from everyrank.launch.reports import rank_of
from everyrank.launch.signals import Stop

__all__ = ["run_ranks"]

_FILES_OF_A_RANK, _FILES_OF_A_WORKER = 32, 4  # with fewer, loader workers and their rank wait for each other for ever


def run_ranks(
    launch: Launch,
    function: Callable[..., Any] | str,
    *arguments: Any,
    stop: Stop | None = None,
    kept: dict[int, Any] | None = None,
) -> dict[int, Any]:
    """Call `function(info, *arguments)` in every rank process; its results by rank, of those started from here.

    function   sent by value where it stands in a notebook or a script; or "module:name", which the rank imports, so
               that this process need not have torch. `info` is its `RankInfo`.
    stop       when it is asked, the ranks are: they get SIGUSR1 until they end by themselves
    kept       gets what each rank has left by `info.keep`, by rank, however the call ends

    Where this process was itself started as a rank (by torchrun, mpirun or srun), the function is called here, with
    `stop` at the end where there is one, and the result is that of this rank alone.

    Raises the error of the rank that failed first, labelled with it; the other ranks are ended within five seconds.
    `UsageError` or `CannotRunError` where the launch cannot be tried here.
    """
    info = rank_info_from_environment(os.environ)
    if info is not None:
        keep = functools.partial(kept.__setitem__, info.rank) if kept is not None else None
        info = dataclasses.replace(info, keep=keep)
        here = (*arguments, stop) if stop is not None else arguments
        return {info.rank: _call_here(info, named_function(function), here)}
    _check(launch)
    with _folders(launch, kept) as (directory, logs):
        # of a function of ours the whole module; a person's modules are imported by the ranks themselves
        preload = function.partition(":")[0] if isinstance(function, str) else "torch"
        job = _job(launch, cloudpickle.dumps((function, arguments)), preload, directory, logs)
        (directory / "job.pickle").write_bytes(pickle.dumps(job))
        with ProcessMonitor(launch, directory, logs, stop) as monitor:
            monitor.wait()
            return monitor.results()


@contextlib.contextmanager
def _folders(launch: Launch, kept: dict[int, Any] | None) -> Generator[tuple[Path, Path]]:
    """The job's folder, and that of the logs, which stays where it was asked for or an error names a log in it."""
    make_folder = _shared_folder if launch.row.needs_shared_folder else _temporary_folder
    directory = make_folder("everyrank-")
    logs = launch.logs or make_folder("everyrank-logs-")
    keep_logs = launch.logs is not None
    try:
        logs.mkdir(parents=True, exist_ok=True)
        yield directory, logs
    except EveryrankError as error:
        keep_logs = keep_logs or error.log is not None
        raise
    finally:
        contents = (
            {rank_of(path): path.read_bytes() for path in directory.glob("rank*.kept")} if kept is not None else {}
        )
        try:
            shutil.rmtree(directory, ignore_errors=True)
        finally:  # a second Ctrl-C in the middle of it
            shutil.rmtree(directory, ignore_errors=True)
            if not keep_logs:
                shutil.rmtree(logs, ignore_errors=True)
        if kept is not None:
            kept.update({rank: pickle.loads(content) for rank, content in contents.items()})  # noqa: S301


def _job(launch: Launch, payload: bytes, preload: str, directory: Path, logs: Path) -> Job:
    """What each rank process finds in the job's folder."""
    return Job(
        payload=payload,
        sys_path=list(sys.path),
        launcher=launch.launcher,
        processes=launch.processes,
        rendezvous_url=_rendezvous_url(launch, directory),
        pid_namespace=pid_namespace(),
        parent_pid=os.getpid(),
        logs=logs.absolute(),
        keeps_logs=launch.logs is not None,
        threads=threads_asked(os.environ),
        preload=preload,
        is_restarted=launch.restarts_ranks,
    )


def _check(launch: Launch) -> None:
    """Whether this launch can be tried here. Raises `UsageError` or `CannotRunError`."""
    if isinstance(launch.row, BatchLauncher):
        launch.row.check_allocation(launch, os.environ)
    launch.row.find()
    _check_files(launch.loader_workers)
    method = launch.init_method
    is_local = not isinstance(launch.row, BatchLauncher)  # else rank 0 is in the allocation
    if isinstance(method, str) and method.startswith("tcp://") and is_local:
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


def _rendezvous_url(launch: Launch, directory: Path) -> str | None:
    """Where the ranks meet unless an init method was asked for; None where their launcher tells them."""
    if launch.rank_launcher.provides_rendezvous:
        return None
    if launch.rendezvous is not None:
        return f"tcp://{launch.rendezvous}"
    if launch.row.launch_per_node:  # all ranks are on this host: they meet in a file, without an open port
        return (directory / "rendezvous").absolute().as_uri()
    return "meet://" + (directory / "address").absolute().as_uri().removeprefix("file://")


def _call_here(info: RankInfo, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call it in this rank, which somebody else started; an error of its own gets a label and a log."""

    def fail(error: BaseException) -> None:
        print(
            f"everyrank: rank {info.rank} of {info.size} on {host_name()}: {printable(str(error))}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(getattr(error, "exit_status", EveryrankError.exit_status))

    try:
        return function(dataclasses.replace(info, fail=fail), *arguments)
    except (UsageError, StoppedError):
        raise
    except Exception as error:
        found = last_words(error)
        logs = _temporary_folder("everyrank-logs-")
        log = logs / f"rank{info.rank}.log"
        log.write_text("".join(traceback.format_exception(error)))
        kind = type(error) if isinstance(error, EveryrankError) else RankFailedError
        raise kind(
            f"rank {info.rank} of {info.size} on {host_name()}: {describe(error)}{found and f'; autopsy: {found}'}", log
        ) from error


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
