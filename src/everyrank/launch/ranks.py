"""The processes of one job: start them, watch them, end them, and tell the root cause when one fails."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from everyrank.errors import EveryrankError, RankFailedError, UsageError, kind_named, signal_text
from everyrank.launch import spawn, torchrun
from everyrank.launch.job import Launch
from everyrank.launch.stop import Stop

__all__ = ["Ranks"]

_RENDER = {"spawn": spawn.render, "torchrun": torchrun.render}
_GRACE_SECONDS = 2.0  # after the first failure, for the others to say what they saw
_ASK_SECONDS = 0.5  # between two requests to stop
_END_SECONDS = 2.0  # between SIGTERM and SIGKILL


class Ranks:
    """The started processes. Leaving the block ends whatever still runs, however the block is left."""

    def __init__(self, launch: Launch, directory: Path, logs: Path, stop: Stop | None = None) -> None:
        self.launch = launch
        self.directory = directory
        self.logs = logs
        self.stop = stop
        self.asked_at = 0.0
        self.launcher_log: IO[bytes] | None = None
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Ranks:
        for stale in [*self.logs.glob("rank*.log"), *self.logs.glob("torchrun.log")]:  # of the run before
            stale.replace(stale.with_name(stale.name + ".before"))
        # torchrun's own messages are kept away from the screen: what it says of a failure is not what failed.
        if self.launch.launcher == "torchrun":
            self.launcher_log = (self.logs / "torchrun.log").open("wb")
        try:
            for command in _RENDER[self.launch.launcher](self.directory, self.launch.processes):
                self.processes.append(self._start(command))
        except BaseException:  # Ctrl-C between two starts: `__exit__` would not be called
            self._end()
            raise
        return self

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603  (our own interpreter and module)
            command,
            stdin=subprocess.DEVNULL,
            stderr=self.launcher_log,
            env=_child_environment(),
            # Ctrl-C reaches this process alone, which then ends them all in order.
            start_new_session=True,
        )

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._end()
        if self.launcher_log is not None:
            self.launcher_log.close()

    def wait(self) -> None:
        """Return when every process has ended well; raise what went wrong first otherwise."""
        deadline = time.monotonic() + self.launch.timeout_seconds
        while True:
            codes = [process.poll() for process in self.processes]
            if any(code not in (None, 0) for code in codes) or self._errors() or self._gone():
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
            self._pass_on_stop()
            time.sleep(0.02)

    def _pass_on_stop(self) -> None:
        """Ask the ranks to stop, again and again: one that is still starting does not listen yet."""
        if self.stop is None or self.stop.asked is None or time.monotonic() < self.asked_at + _ASK_SECONDS:
            return
        self.asked_at = time.monotonic()
        _signal(os.kill, self._pids(), signal.SIGUSR1)  # the ranks alone, not their data loader workers

    def _pids(self) -> list[int]:
        written = [path.read_text() for path in self.directory.glob("rank*.pid")]
        return [int(text) for text in written if text]

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
        if self.launcher_log is not None:  # torchrun writes down what became of its ranks when it ends
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[0].wait(timeout=_GRACE_SECONDS)
        self._raise_signal(besides=signal.SIGABRT)
        for rank, code in self._gone().items():
            raise RankFailedError(
                f"rank {rank} of {self.launch.processes}: exited with status {code} before its work was done",
                self._log(rank),
            )
        errors = self._errors()
        if errors:
            raise self._error(errors)
        self._raise_signal()  # an abort is often but the answer to another rank's error
        raise RankFailedError(
            f"{self.launch.launcher} ended before its ranks had started; see its log",
            self.logs / "torchrun.log",
        )

    def _raise_signal(self, besides: signal.Signals | None = None) -> None:
        for rank, code in self._exit_codes().items():
            if code < 0 and -code != besides:
                raise RankFailedError(
                    f"rank {rank} of {self.launch.processes}: ended by {signal_text(-code)}", self._log(rank)
                )

    def _error(self, errors: list[dict[str, Any]]) -> EveryrankError:
        first = errors[0]
        kind = kind_named(first["kind"])
        log = self._log(first["rank"]) if first["has_frames"] else None
        # A wrong call or workload is wrong on every rank; what one rank alone meets is a failed run.
        alike = [row for row in errors if _place(row["message"]) == _place(first["message"])]
        alone = issubclass(kind, UsageError) and len(alike) < self.launch.processes
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
        text = (self.logs / "torchrun.log").read_text(errors="replace")
        root = text.rpartition("Root Cause")[2]
        found = re.search(r"rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", root, re.DOTALL)
        return {int(found[1]): int(found[2])} if found else {}

    def _gone(self) -> dict[int, int]:
        """Exit codes of ranks that ended without leaving a result or an error."""
        codes = self._exit_codes()
        if self.launcher_log is None:
            codes = {rank: code for rank, p in enumerate(self.processes) if (code := p.poll()) is not None}
        elif self.processes[0].poll() == 0:
            codes = dict.fromkeys(range(self.launch.processes), 0)
        left = ("result", "error")
        return {
            rank: code
            for rank, code in codes.items()
            if code >= 0 and not any((self.directory / f"rank{rank}.{kind}").exists() for kind in left)
        }

    def _log(self, rank: int) -> Path | None:
        path = self.logs / f"rank{rank}.log"
        return path if path.exists() and path.stat().st_size else None

    def _end(self) -> None:
        """SIGTERM to all, SIGKILL to whoever is left; their data loader workers are in the same groups."""
        groups = [process.pid for process in self.processes]  # a group may outlive the rank that led it
        pids = self._pids()
        if self.stop is None:  # ranks that listen take it for a request
            _signal(os.killpg, groups, signal.SIGTERM)
            deadline = time.monotonic() + _END_SECONDS
            while time.monotonic() < deadline and any(process.poll() is None for process in self.processes):
                time.sleep(0.02)
        _signal(os.killpg, groups, signal.SIGKILL)
        if self.launch.launcher == "torchrun":
            _signal(os.kill, pids, signal.SIGKILL)
            _signal(os.killpg, pids, signal.SIGKILL)  # each has a group of its own, with its data loader workers
        for process in self.processes:
            process.wait()


def _place(message: str) -> list[str]:
    """`my_workload.py:12 in loss: RuntimeError`, without what may differ from rank to rank."""
    return message.split(": ")[:-1]


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
