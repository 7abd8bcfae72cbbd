"""The processes of one job: start them, watch them, end them, and tell the root cause when one fails."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from everyrank.errors import EveryrankError, RankFailedError, StoppedError, UsageError, kind_named, signal_text
from everyrank.launch import mpi, ray, slurm, spawn, torchrun
from everyrank.launch.hosts import host_name
from everyrank.launch.job import Launch
from everyrank.launch.silence import is_a_wait, of_silent, wake_guards
from everyrank.launch.stop import Stop

__all__ = ["RENDER", "Ranks"]

RENDER: dict[str, Callable[[Launch, Path], list[list[str]]]] = {
    "spawn": spawn.render,
    "torchrun": torchrun.render,
    "slurm": slurm.render,
    "mpi": mpi.render,
    "ray": ray.render,
}
_GRACE_SECONDS = 2.0  # after the first failure, for the others to say what they saw
_END_SECONDS = 2.0  # between SIGTERM and SIGKILL
_BEAT_SECONDS = 1.0  # for guards on other machines
_FILES_SECONDS = 5.0  # until what a rank on another host has written can be read here


class Ranks:
    """The started processes. Leaving the block ends whatever still runs, however the block is left."""

    def __init__(self, launch: Launch, directory: Path, logs: Path, stop: Stop | None = None) -> None:
        self.launch = launch
        self.directory = directory
        self.logs = logs
        self.stop = stop
        self.launcher_log: IO[bytes] | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self.beat_at = 0.0
        # where each host starts its own, only theirs report here
        is_one_of_several = launch.nodes > 1 and launch.launcher in ("spawn", "torchrun")
        self.count = launch.processes_per_node if is_one_of_several else launch.processes
        first = (launch.node_rank or 0) * self.count if is_one_of_several else 0
        self.expected = range(first, first + self.count)
        self.starts_again = launch.restarts > 0 or launch.min_nodes is not None

    def __enter__(self) -> Ranks:
        for stale in self._logs_of_before():
            with contextlib.suppress(FileNotFoundError):
                stale.replace(stale.with_name(stale.name + ".before"))
        # A launcher's own messages are kept away from the screen: what it says of a failure is not what failed.
        if self.launch.launcher != "spawn":
            self.launcher_log = (self.logs / self._launcher_log_name).open("wb")
        self._beat()
        try:
            for command in RENDER[self.launch.launcher](self.launch, self.directory):
                self.processes.append(self._start(command))
        except BaseException:  # Ctrl-C between two starts: `__exit__` would not be called
            self._end()
            raise
        return self

    @property
    def _launcher_log_name(self) -> str:
        # hosts that each start their own may share the folder
        return f"{self.launch.launcher}{f'-{host_name()}' if self.launch.nodes > 1 else ''}.log"

    def _logs_of_before(self) -> list[Path]:
        """Those that this host's ranks are about to write, from the run before."""
        if self.launch.nodes > 1 and self.launch.finds_its_place:  # which ranks are here is decided later
            return [self.logs / self._launcher_log_name]
        return [self.logs / self._launcher_log_name, *(self.logs / f"rank{rank}.log" for rank in self.expected)]

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
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
        else:  # what a workload has started and forgotten
            _signal(os.killpg, [process.pid for process in self.processes], signal.SIGKILL)
        if self.launcher_log is not None:
            self.launcher_log.close()

    def wait(self) -> None:
        """Return when every process has ended well; raise what went wrong first otherwise."""
        deadline = time.monotonic() + self.launch.timeout_seconds
        is_asked = False
        while True:
            codes = [process.poll() for process in self.processes]
            is_final = not self.starts_again or self._is_asked
            failed = is_final and (self._errors() or self._dead())
            if failed or any(code not in (None, 0) for code in codes):
                self._raise_first_failure()
            if all(code == 0 for code in codes):
                return
            missing = [] if deadline == 0 else self._not_started()
            if not missing:
                deadline = 0
            elif time.monotonic() > deadline:
                raise RankFailedError(
                    f"{_ranks_text(missing)} of {self.launch.processes} never started: "
                    f"no sign within {self.launch.timeout_seconds:g} s (--timeout){self._last_words()}"
                )
            if self._is_asked and not is_asked:
                is_asked = True
                (self.directory / "stop").touch()  # each rank's guard looks for it
            if time.monotonic() > self.beat_at + _BEAT_SECONDS:
                self._beat()
            time.sleep(0.02 if missing else 0.1)

    def _beat(self) -> None:
        self.beat_at = time.monotonic()
        with contextlib.suppress(OSError):  # of storage elsewhere
            (self.directory / "alive").touch()
        wake_guards(self.directory)

    def results(self) -> dict[int, Any]:
        """What the function returned in each rank that reports here."""
        deadline = time.monotonic() + _FILES_SECONDS
        while not (found := sorted(self.directory.glob("rank*.result"))) or (
            len(found) < self.count and not self.starts_again
        ):
            if time.monotonic() > deadline:
                raise RankFailedError(f"{self.count - len(found)} of {self.count} ranks left no result")
            time.sleep(0.05)
        return {
            _rank_of(path): pickle.loads(path.read_bytes())  # noqa: S301
            for path in sorted(found, key=_rank_of)
        }

    def _not_started(self) -> list[int]:
        there = {_rank_of(path) for path in self.directory.glob("rank*.pid")}
        if len(there) >= self.count:  # torchrun's c10d rendezvous decides which host has which ranks
            return []
        return [rank for rank in self.expected if rank not in there]

    def _raise_first_failure(self) -> None:
        """Let the others say what they saw, then raise the root cause: a killed rank, else the earliest error."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and len(self._errors()) + len(self._dead()) < self.count:
            time.sleep(0.02)
        if self.launcher_log is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[0].wait(timeout=_GRACE_SECONDS)
        dead = self._dead()
        # who was asked to end, or has aborted, often only answers to what another rank met
        answers = (-signal.SIGTERM, -signal.SIGABRT, 128 + signal.SIGTERM)
        for row in dead:
            if row["code"] < 0 and row["code"] not in answers:
                raise self._died(row)
        for row in dead:
            if row["code"] not in answers:
                raise self._died(row)
        errors = self._errors()
        if errors:
            raise self._hanging(errors) or self._error(errors)
        if dead:
            raise self._died(dead[0])
        raise RankFailedError(
            f"{self.launch.launcher} ended before its ranks had started{self._last_words()}",
            self.logs / self._launcher_log_name,
        )

    def _died(self, row: dict[str, Any]) -> RankFailedError:
        code = row["code"]
        if row.get("for_memory"):
            what = "killed for memory (SIGKILL): its control group has used all that it may (oom_kill)"
        elif code < 0:
            what = f"ended by {signal_text(-code)}"
        else:
            what = f"exited with status {code} before its work was done"
        return RankFailedError(f"{self._who(row)}: {what}", self._log(row["rank"]))

    def _hanging(self, errors: list[dict[str, Any]]) -> RankFailedError | None:
        """Whom the first error was a wait for; None where it was none, or all have said something."""
        first = errors[0]
        silent = [rank for rank in self.expected if rank not in {row["rank"] for row in errors}]
        if not is_a_wait(first["message"]) or not silent or self.count < self.launch.processes:
            return None
        found = of_silent(self.directory, silent)
        who, states = _ranks_text(list(found)), "; ".join(dict.fromkeys(found.values()))
        return RankFailedError(
            f"{who} of {self.launch.processes} did not come within {self.launch.timeout_seconds:g} s (--timeout), "
            f"{states}; rank {first['rank']} waited in {first['message']}"
        )

    def _error(self, errors: list[dict[str, Any]]) -> EveryrankError:
        # ranks that stopped because their launcher asked them to, when another had failed
        first = next((row for row in errors if row["kind"] != StoppedError.__name__), errors[0])
        kind = kind_named(first["kind"])
        log = self._log(first["rank"]) if first["has_frames"] else None
        # A wrong call or workload is wrong on every rank; what one rank alone meets is a failed run.
        alike = [row for row in errors if _place(row["message"]) == _place(first["message"])]
        alone = issubclass(kind, UsageError) and len(alike) < self.count
        if alone or kind is RankFailedError:
            return RankFailedError(f"{self._who(first)}: {first['message']}", log)
        return kind(first["message"], log)

    @property
    def _is_asked(self) -> bool:
        """Whether a signal has asked the training to stop."""
        return self.stop is not None and self.stop.asked is not None

    def _who(self, row: dict[str, Any]) -> str:
        return f"rank {row['rank']} of {self.launch.processes} on {row['host']}"

    def _errors(self) -> list[dict[str, Any]]:
        """What the ranks reported, earliest first."""
        return self._rows("error")

    def _dead(self) -> list[dict[str, Any]]:
        """Ranks that ended without leaving a result or an error, earliest first."""
        rows = self._rows("exit")
        if self.launch.launcher == "spawn":  # a guard that was killed wrote nothing
            written = {row["rank"] for row in rows}
            ended = zip(self.expected, self.processes, strict=False)
            codes = {rank: process.poll() for rank, process in ended if rank not in written}
            rows += [_row(rank, code) for rank, code in codes.items() if code]
        left = ("result", "error")
        return [
            row for row in rows if not any((self.directory / f"rank{row['rank']}.{kind}").exists() for kind in left)
        ]

    def _rows(self, kind: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for path in self.directory.glob(f"rank*.{kind}"):
            with contextlib.suppress(FileNotFoundError):  # a rank that is started again takes its own away
                rows.append(json.loads(path.read_text()))
        return sorted(rows, key=lambda row: row["time"])

    def _last_words(self) -> str:
        """The last line that a launcher said."""
        if self.launcher_log is None:
            return ""
        text = (self.logs / self._launcher_log_name).read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))]
        return f": {lines[-1]}" if lines else ""

    def _log(self, rank: int) -> Path | None:
        """The rank's log, where there is more in it than its first line."""
        path = self.logs / f"rank{rank}.log"
        return path if path.exists() and len(path.read_text(errors="replace").splitlines()) > 1 else None

    def _end(self) -> None:
        """SIGTERM to all, SIGKILL to whoever is left; their data loader workers are in the same groups."""
        groups = [process.pid for process in self.processes]  # a group may outlive the rank that led it
        ranks = [tuple(map(int, path.read_text().split())) for path in self.directory.glob("rank*.pid")]
        # ranks that listen take SIGTERM for a request to stop; these launchers pass it on, and must end in order
        if self.stop is None or self.launch.launcher in ("slurm", "mpi", "ray"):
            _signal(os.killpg, groups, signal.SIGTERM)
            deadline = time.monotonic() + _END_SECONDS
            while time.monotonic() < deadline and any(process.poll() is None for process in self.processes):
                time.sleep(0.02)
        _signal(os.killpg, groups, signal.SIGKILL)
        if self.launch.launcher != "spawn":  # each of their ranks has a group of its own; guards elsewhere see the end
            mine = os.getpgrp()
            _signal(os.kill, [row[0] for row in ranks if len(row) == 2], signal.SIGKILL)
            _signal(os.killpg, [row[1] for row in ranks if len(row) == 2 and row[1] != mine], signal.SIGKILL)
        for process in self.processes:
            process.wait()


def _child_environment() -> dict[str, str]:
    # The world sets the number of threads itself; the first variable only spares torchrun its warning. The second
    # tells rich, in rank 0, whether there is a terminal at the end of what a launcher passes on. Without the third,
    # c10d warns when it cannot find the name of an address, which nobody asked for.
    terminal = str(int(sys.stdout.isatty()))
    return {"OMP_NUM_THREADS": "1", "TTY_COMPATIBLE": terminal, "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}


def _rank_of(path: Path) -> int:
    """The rank whose file this is: rank3.result."""
    return int(path.stem.removeprefix("rank"))


def _row(rank: int, code: int) -> dict[str, Any]:
    return {"rank": rank, "host": host_name(), "code": code, "time": time.time()}


def _place(message: str) -> list[str]:
    """`my_workload.py:12 in loss: RuntimeError`, without what may differ from rank to rank."""
    return message.split(": ")[:-1]


def _signal(send: Callable[[int, int], None], targets: Iterable[int], number: signal.Signals) -> None:
    for target in targets:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(target, number)


def _ranks_text(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
