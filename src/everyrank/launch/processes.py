"""Start the processes, watch them, end them. The first error of any rank is raised in the caller.

Results and errors come back through files in a directory that only this user can open.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import cloudpickle

from everyrank.errors import EveryrankError, RankFailedError, UsageError, describe, kind_named, signal_text
from everyrank.launch import spawn, torchrun
from everyrank.launch.facts import RankFacts, facts_from_environment

__all__ = ["Job", "Launch", "Named", "run"]

_RENDER = {"spawn": spawn.render, "torchrun": torchrun.render}
_GRACE_SECONDS = 1.0  # after the first failure, for the others to say what they saw
_END_SECONDS = 2.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True)
class Launch:
    """How processes start.

    launcher         spawn or torchrun
    processes        ranks in all
    device           cpu or cuda; None: cuda where there is one
    backend          gloo or nccl; None: chosen by `world.choose_backend`
    loader_workers   data loader processes of each rank; 0 loads in the rank itself
    timeout_seconds  longest wait for another rank, at start, in a collective and at the end
    logs             folder for the ranks' logs; None: a temporary one, kept only after a failure

    Raises `UsageError` for a value that cannot be meant.
    """

    launcher: str = "spawn"
    processes: int = 1
    device: str | None = None
    backend: str | None = None
    loader_workers: int = 0
    timeout_seconds: float = 300.0
    logs: Path | None = None

    def __post_init__(self) -> None:
        if self.launcher not in _RENDER:
            raise UsageError(f"--launcher {self.launcher}: give one of {', '.join(_RENDER)}")
        if self.processes < 1:
            raise UsageError(f"--processes {self.processes}: give at least 1")
        if self.device not in (None, "cpu", "cuda"):
            raise UsageError(f"--device {self.device}: give cpu or cuda")
        if self.backend not in (None, "gloo", "nccl"):
            raise UsageError(f"--backend {self.backend}: give gloo or nccl")
        if self.loader_workers < 0:
            raise UsageError(f"--workers {self.loader_workers}: give 0 or more")
        if not self.timeout_seconds > 0:
            raise UsageError(f"--timeout {self.timeout_seconds}: give more than 0 seconds")


@dataclass(frozen=True)
class Named:
    """A function by its name, imported where it is called: the caller's own process needs no torch.

    `Named("everyrank.train:train_rank")(facts, ...)`.
    """

    target: str

    def __call__(self, *arguments: Any) -> Any:
        """Import it and call it."""
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)(*arguments)


@dataclass(frozen=True)
class Job:
    """What each process finds in its directory. The payload is opened after `sys_path` is in place."""

    payload: bytes
    sys_path: list[str]
    processes: int
    parent_pid: int
    logs: Path

    def function(self) -> Callable[..., Any]:
        """What to call."""
        return pickle.loads(self.payload)[0]  # noqa: S301  (our own parent wrote it)

    def arguments(self) -> tuple[Any, ...]:
        """With what, after the rank facts."""
        return pickle.loads(self.payload)[1]  # noqa: S301


def run(launch: Launch, function: Callable[..., Any], *arguments: Any) -> dict[int, Any]:
    """Call `function(facts, *arguments)` in every rank; its results by rank.

    Functions of a notebook or a script are sent by value. Where this process was itself started as a rank (by
    torchrun), the function is called here and the result is that of this rank alone.

    Raises the error of the rank that failed first, labelled with it; the other ranks are ended within five seconds.
    """
    facts = facts_from_environment(os.environ)
    if facts is not None:
        return {facts.rank: _call_here(facts, function, arguments)}
    directory = Path(tempfile.mkdtemp(prefix="everyrank-"))
    logs = launch.logs or Path(tempfile.mkdtemp(prefix="everyrank-logs-"))
    keep_logs = launch.logs is not None
    try:
        logs.mkdir(parents=True, exist_ok=True)
        payload = cloudpickle.dumps((function, arguments))
        job = Job(payload, list(sys.path), launch.processes, os.getpid(), logs.absolute())
        (directory / "job.pickle").write_bytes(pickle.dumps(job))
        with _Ranks(launch, directory, logs) as ranks:
            ranks.wait()
        return ranks.results()
    except EveryrankError as error:
        keep_logs = keep_logs or error.log is not None
        raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if not keep_logs:
            shutil.rmtree(logs, ignore_errors=True)


def _call_here(facts: RankFacts, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call it in this rank, which somebody else started; an error of its own gets a label and a log."""
    try:
        return function(facts, *arguments)
    except UsageError:
        raise
    except Exception as error:
        logs = Path(tempfile.mkdtemp(prefix="everyrank-logs-"))
        log = logs / f"rank{facts.rank}.log"
        log.write_text("".join(traceback.format_exception(error)))
        kind = type(error) if isinstance(error, EveryrankError) else RankFailedError
        raise kind(f"rank {facts.rank} of {facts.size}: {describe(error)}", log) from error


class _Ranks:
    """The started processes. Leaving the block ends whatever still runs, however the block is left."""

    def __init__(self, launch: Launch, directory: Path, logs: Path) -> None:
        self.launch = launch
        self.directory = directory
        self.logs = logs
        self.launcher_log: IO[bytes] | None = None
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> _Ranks:
        # torchrun's own messages are kept away from the screen: what it says of a failure is not what failed.
        if self.launch.launcher == "torchrun":
            self.launcher_log = (self.logs / "torchrun.log").open("ab")
        for command in _RENDER[self.launch.launcher](self.directory, self.launch.processes):
            self.processes.append(
                subprocess.Popen(  # noqa: S603  (our own interpreter and module)
                    command,
                    stdin=subprocess.DEVNULL,
                    stderr=self.launcher_log,
                    env=_child_environment(),
                    # Ctrl-C reaches this process alone, which then ends them all in order.
                    start_new_session=True,
                )
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        if self.launcher_log is not None:
            self.launcher_log.close()

    def wait(self) -> None:
        """Return when every process has ended well; raise what went wrong first otherwise."""
        deadline = time.monotonic() + self.launch.timeout_seconds
        while True:
            codes = [process.poll() for process in self.processes]
            if any(code not in (None, 0) for code in codes) or any(self.directory.glob("rank*.error")):
                self._raise_first_failure()
            if all(code == 0 for code in codes):
                return
            missing = [] if deadline == 0 else self._not_started()
            if not missing:
                deadline = 0
            elif time.monotonic() > deadline:
                raise RankFailedError(
                    f"{_ranks_text(missing)} of {self.launch.processes} never started: "
                    f"no sign within {self.launch.timeout_seconds:g} s (--timeout)"
                )
            time.sleep(0.02)

    def results(self) -> dict[int, Any]:
        """What the function returned in each rank."""
        ranks = range(self.launch.processes)
        return {
            rank: pickle.loads((self.directory / f"rank{rank}.result").read_bytes())  # noqa: S301
            for rank in ranks
        }

    def _not_started(self) -> list[int]:
        return [rank for rank in range(self.launch.processes) if not (self.directory / f"rank{rank}.pid").exists()]

    def _raise_first_failure(self) -> None:
        """Let the others say what they saw, then raise the root cause: a killed rank, else the earliest error."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and len(self._errors()) < self.launch.processes:
            time.sleep(0.02)
        for rank, code in self._exit_codes().items():
            if code < 0:
                raise RankFailedError(
                    f"rank {rank} of {self.launch.processes}: ended by {signal_text(-code)}", self._log(rank)
                )
        errors = self._errors()
        if errors:
            raise self._error(errors)
        for rank, code in self._exit_codes().items():
            raise RankFailedError(
                f"rank {rank} of {self.launch.processes}: exited with status {code} before its work was done",
                self._log(rank),
            )
        raise RankFailedError(
            f"{self.launch.launcher} ended before its ranks had started; see its log",
            self.logs / "torchrun.log",
        )

    def _error(self, errors: list[dict[str, Any]]) -> EveryrankError:
        first = errors[0]
        kind = kind_named(first["kind"])
        log = self._log(first["rank"]) if first["has_frames"] else None
        # A wrong call or workload is wrong on every rank; what one rank alone meets is a failed run.
        alone = issubclass(kind, UsageError) and len(errors) < self.launch.processes
        if alone or kind is RankFailedError:
            return RankFailedError(f"rank {first['rank']} of {self.launch.processes}: {first['message']}", log)
        return kind(first["message"], log)

    def _errors(self) -> list[dict[str, Any]]:
        """What the ranks reported, earliest first."""
        rows = [json.loads(path.read_text()) for path in self.directory.glob("rank*.error")]
        return sorted(rows, key=lambda row: row["time"])

    def _exit_codes(self) -> dict[int, int]:
        """Exit codes other than 0 by rank; under torchrun, what torchrun wrote of them."""
        if self.launcher_log is None:
            return {rank: code for rank, process in enumerate(self.processes) if (code := process.poll())}
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes[0].wait(timeout=_GRACE_SECONDS)
        text = (self.logs / "torchrun.log").read_text(errors="replace")
        root = text.rpartition("Root Cause")[2]
        found = re.search(r"rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", root, re.DOTALL)
        return {int(found[1]): int(found[2])} if found else {}

    def _log(self, rank: int) -> Path | None:
        path = self.logs / f"rank{rank}.log"
        return path if path.exists() and path.stat().st_size else None

    def _end(self) -> None:
        """SIGTERM to all, SIGKILL to whoever is left; their data loader workers are in the same groups."""
        groups = [process.pid for process in self.processes if process.poll() is None]
        written = [path.read_text() for path in self.directory.glob("rank*.pid")] if groups else []
        pids = [int(text) for text in written if text]
        _signal(os.killpg, groups, signal.SIGTERM)
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline and any(process.poll() is None for process in self.processes):
            time.sleep(0.02)
        _signal(os.killpg, groups, signal.SIGKILL)
        if self.launch.launcher == "torchrun":
            _signal(os.kill, pids, signal.SIGKILL)
        for process in self.processes:
            process.wait()


def _signal(send: Callable[[int, int], None], targets: Iterable[int], number: signal.Signals) -> None:
    for target in targets:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(target, number)


def _ranks_text(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _child_environment() -> dict[str, str]:
    """Our environment, with the communication of ranks on one host kept on loopback unless somebody chose."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    # The world sets the number of threads itself; the variable only spares torchrun its warning.
    defaults = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1"}
    return {**defaults, **os.environ}
