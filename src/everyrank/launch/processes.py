"""`run_ranks`: call a function on every rank and return the results by rank.

It starts the rank processes, or calls the function here if this process is itself a rank. Results and errors are
returned through files in a folder that only this user can open.
"""

from __future__ import annotations

import contextlib
import contextvars
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
from typing import TYPE_CHECKING, Any

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
from everyrank.launch.job import Job, Launch, is_named_by_rendezvous, job_name, named_function
from everyrank.launch.launcher import BatchLauncher
from everyrank.launch.monitor import ProcessMonitor
from everyrank.launch.rank_info import RankInfo
from everyrank.launch.reports import rank_of
from everyrank.launch.signals import Stop

if TYPE_CHECKING:
    from everyrank.launch.zygote import Zygote

__all__ = ["run_ranks", "starts_no_ranks", "stop_before_ranks", "stopping_before_ranks"]

_FILES_PER_RANK, _FILES_PER_WORKER = 32, 4  # with fewer open files, a rank and its loader workers deadlock
_STARTS_NO_RANKS = contextvars.ContextVar("_STARTS_NO_RANKS", default=False)


class _StoppedBeforeRanksError(BaseException):
    """Ends the body of `stopping_before_ranks`. It is no `Exception`, because that may be handled as a failed run."""


@contextlib.contextmanager
def stopping_before_ranks() -> Generator[None]:
    """End the body of `with`, without an error, where it would start ranks. So a call is checked without any rank.

    Raises the errors of the body.
    """
    token = _STARTS_NO_RANKS.set(True)
    try:
        yield
    except _StoppedBeforeRanksError:
        pass
    finally:
        _STARTS_NO_RANKS.reset(token)


def starts_no_ranks() -> bool:
    """Whether the current call is only checked, by `stopping_before_ranks`."""
    return _STARTS_NO_RANKS.get()


def stop_before_ranks() -> None:
    """End a call that is only checked. `run_ranks` does this, and other functions that would start ranks."""
    if starts_no_ranks():
        raise _StoppedBeforeRanksError


def run_ranks(
    launch: Launch,
    function: Callable[..., Any] | str,
    *arguments: Any,
    stop: Stop | None = None,
    kept: dict[int, Any] | None = None,
    zygote: Zygote | None = None,
    limit_seconds: float | None = None,
) -> dict[int, Any]:
    """Call `function(info, *arguments)` in every rank process. Returns the results by rank.

    For example `run_ranks(Launch(processes=2), lambda info: info.rank)` returns `{0: 0, 1: 1}`.

    function   pickled by value if it is defined in a notebook or a script; or "module:name", which the rank imports, so
               that this process need not have torch. `info` is a `RankInfo`
    stop       when it requests a stop, ranks receive SIGUSR1 until they end by themselves
    zygote     forks the ranks, in place of new processes
    limit_seconds  after which ranks that still run are ended, and the error is the autopsy
    kept       receives the preliminary results of `info.keep` by rank, also after an error

    If this process was started as a rank (by torchrun, mpirun or srun), the function is called here, with `stop` as its
    last argument if given, and the result is only that of this rank.

    Raises the error of the rank that failed first, with its number. All other ranks are ended within five seconds.
    Raises `UsageError` or `CannotRunError` if the launch is not possible here.
    """
    info = rank_info_from_environment(os.environ)
    if info is not None:
        keep = functools.partial(kept.__setitem__, info.rank) if kept is not None else None
        info = dataclasses.replace(info, keep=keep)
        local_arguments = (*arguments, stop) if stop is not None else arguments
        return {info.rank: _call_here(info, named_function(function), local_arguments)}
    stop_before_ranks()
    _check(launch)
    with _folders(launch, kept) as (directory, logs):
        # The module of a function that is given by its name. The ranks import all other modules themselves.
        preload = function.partition(":")[0] if isinstance(function, str) else "torch"
        job = _job(launch, cloudpickle.dumps((function, arguments)), preload, directory, logs)
        (directory / "job.pickle").write_bytes(pickle.dumps(job))
        with ProcessMonitor(launch, directory, logs, stop, zygote, limit_seconds) as monitor:
            monitor.wait()
            return monitor.results()


@contextlib.contextmanager
def _folders(launch: Launch, kept: dict[int, Any] | None) -> Generator[tuple[Path, Path]]:
    """(job folder, folder of the logs). Logs are kept if the user named their folder, or an error names a log."""
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
        kept_files = (
            {rank_of(path): path.read_bytes() for path in directory.glob("rank*.kept")} if kept is not None else {}
        )
        try:
            shutil.rmtree(directory, ignore_errors=True)
        finally:  # a second Ctrl-C may interrupt the deletion
            shutil.rmtree(directory, ignore_errors=True)
            if not keep_logs:
                shutil.rmtree(logs, ignore_errors=True)
        if kept is not None:
            kept.update({rank: pickle.loads(content) for rank, content in kept_files.items()})  # noqa: S301


def _job(launch: Launch, payload: bytes, preload: str, directory: Path, logs: Path) -> Job:
    """Return the content of job.pickle, which each rank process reads."""
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
        name=job_name(launch, directory),
        is_name_unique=not is_named_by_rendezvous(launch),
    )


def _check(launch: Launch) -> None:
    """Raise `UsageError` or `CannotRunError` if this launch is not possible here."""
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
    """Raise `UsageError` if the limit of open files is too small for this number of loader workers."""
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _FILES_PER_RANK + _FILES_PER_WORKER * workers
    if workers and limit != resource.RLIM_INFINITY and limit < needed:
        raise UsageError(
            f"--workers {workers}: a rank with these workers needs {needed} open files, but the limit is {limit}; "
            f"type ulimit -n {max(1024, needed)}, or give --workers 0"
        )


def _rendezvous_url(launch: Launch, directory: Path) -> str | None:
    """Where the ranks meet without --init-method; None if their launcher tells them."""
    if launch.rank_launcher.provides_rendezvous:
        return None
    if launch.rendezvous is not None:
        return f"tcp://{launch.rendezvous}"
    if launch.row.launch_per_node:  # all ranks are on this host: they meet in a file, without an open port
        return (directory / "rendezvous").absolute().as_uri()
    return "meet://" + (directory / "address").absolute().as_uri().removeprefix("file://")


def _call_here(info: RankInfo, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call the function in this rank of an external launcher. An unexpected error is labelled and written to a log."""

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
        autopsy = last_words(error)
        logs = _temporary_folder("everyrank-logs-")
        log = logs / f"rank{info.rank}.log"
        log.write_text("".join(traceback.format_exception(error)))
        kind = type(error) if isinstance(error, EveryrankError) else RankFailedError
        raise kind(
            f"rank {info.rank} of {info.size} on {host_name()}: {describe(error)}{autopsy and f'; autopsy: {autopsy}'}",
            log,
        ) from error


def _shared_folder(prefix: str) -> Path:
    """Return a folder below the home directory, which the hosts of a cluster share."""
    folder = Path.home() / ".cache" / "everyrank" / "jobs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
    except OSError as error:
        raise CannotRunError(
            f"cannot create a folder for the job: {error}; it must be on storage that all hosts share"
        ) from error


def _temporary_folder(prefix: str) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise CannotRunError(
            f"cannot create a temporary folder: {error}; set TMPDIR to a folder that can be written"
        ) from error
