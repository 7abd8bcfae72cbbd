"""The files that ranks and supervisors write to the job folder, and the root cause of a failure.

rank3.pid      process number and group; empty for a process on another host
rank3.result   the result of the function
rank3.error    its exception
rank3.exit     how the rank process ended, written by its supervisor
rank3.kept     a preliminary result, used if there is no result
"""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyrank.errors import (
    LOCATION_PATTERN,
    EveryrankError,
    RankFailedError,
    StoppedError,
    UsageError,
    kind_named,
    signal_text,
)
from everyrank.launch.autopsy import FOLDER, last_place
from everyrank.launch.host_info import host_name
from everyrank.launch.job import Launch
from everyrank.launch.stalled_ranks import diagnose_stalled, is_a_wait, lost_another

__all__ = ["Reports", "exit_row", "rank_of", "ranks_text"]

_FILES_SECONDS = 5.0  # until a file written on another host is visible here
# A rank with one of these exit codes often only reacted to the failure of another rank.
_TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)
_REACTIONS = (*_TERMINATED, -signal.SIGABRT)


@dataclass(frozen=True)
class Reports:
    """The files of the ranks of one job.

    directory         the job folder
    logs              the folder of the ranks' logs
    size              number of ranks over all hosts
    expected          the ranks that report to this process
    launch            its timeouts are shown in messages
    """

    directory: Path
    logs: Path
    size: int
    expected: range
    launch: Launch

    def results(self, needs_all: bool) -> dict[int, Any]:
        """Results by rank. Raises `RankFailedError` if there is none, or with `needs_all` if one is missing."""
        deadline = time.monotonic() + _FILES_SECONDS
        count = len(self.expected)
        while not (paths := sorted(self.directory.glob("rank*.result"))) or (len(paths) < count and needs_all):
            if time.monotonic() > deadline:
                with_result = {rank_of(path) for path in paths}
                missing = [rank for rank in self.expected if rank not in with_result]
                raise RankFailedError(
                    f"{ranks_text(missing)} of {self.size} returned no result: the process ended with status 0 before "
                    f"its work was done, for example by os._exit{self._last_seen(missing[0])}",
                    path if (path := self.logs / f"rank{missing[0]}.log").exists() else None,
                )
            time.sleep(0.05)
        return {
            rank_of(path): pickle.loads(path.read_bytes())  # noqa: S301
            for path in sorted(paths, key=rank_of)
        }

    def _last_seen(self, rank: int) -> str:
        line = last_place(self.logs / FOLDER, rank, time.time())
        return f"; rank {rank}: {line}" if line else ""

    def not_started(self) -> list[int]:
        """Return the expected ranks that have not started yet."""
        started = {rank_of(path) for path in self.directory.glob("rank*.pid")}
        if len(started) >= len(self.expected):  # torchrun's c10d rendezvous decides which host has which ranks
            return []
        return [rank for rank in self.expected if rank not in started]

    def processes(self) -> list[tuple[int, int]]:
        """Return (process, group) of each rank process of this host."""
        rows: list[list[str]] = []
        for path in self.directory.glob("rank*.pid"):
            with contextlib.suppress(FileNotFoundError):  # a rank that is restarted deletes its old files
                rows.append(path.read_text().split())
        return [(int(row[0]), int(row[1])) for row in rows if len(row) == 2]

    def errors(self) -> list[dict[str, Any]]:
        """Return the errors reported by ranks, earliest first."""
        return self._rows("error")

    def dead(self, codes: Mapping[int, int | None]) -> list[dict[str, Any]]:
        """Ranks that ended without leaving a result or an error, earliest first.

        `codes` are exit codes of supervisors by rank, if known: a supervisor that was killed wrote no file.
        """
        rows = self._rows("exit")
        written = {row["rank"] for row in rows}
        rows += [exit_row(rank, code) for rank, code in codes.items() if code and rank not in written]
        final_files = ("result", "error")
        return [
            row
            for row in rows
            if not any((self.directory / f"rank{row['rank']}.{kind}").exists() for kind in final_files)
        ]

    def _rows(self, kind: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for path in self.directory.glob(f"rank*.{kind}"):
            with contextlib.suppress(FileNotFoundError):  # a rank that is restarted deletes its old files
                rows.append(json.loads(path.read_text()))
        return sorted(rows, key=lambda row: row["time"])

    def root_cause(self, dead: list[dict[str, Any]]) -> EveryrankError | None:
        """Return the root cause of a failure; None if it is unknown.

        It is a rank that was killed, else one that exited without a report, else the first error.
        """
        for row in dead:
            if row["code"] < 0 and row["code"] not in _REACTIONS:
                return self._died(row)
        for row in dead:
            if row["code"] not in _REACTIONS:
                return self._died(row)
        errors = self.errors()
        if errors:
            return self._hanging(errors) or self._error(errors)
        return self._died(dead[0]) if dead else None

    def were_terminated(self, dead: list[dict[str, Any]]) -> bool:
        """Return whether SIGTERM ended all of these ranks, and no rank reported an error: their launcher may have."""
        return bool(dead) and all(row["code"] in _TERMINATED for row in dead) and not self.errors()

    def _died(self, row: dict[str, Any]) -> RankFailedError:
        code = row["code"]
        if row.get("for_memory"):
            cause = "killed by SIGKILL: the machine or its control group ran out of memory (oom_kill)"
        elif code < 0:
            cause = f"ended by {signal_text(-code)}"
            if code == -signal.SIGABRT:
                cause += ", by a C library; gloo aborts if the sizes or dtypes of a collective differ between ranks"
        else:
            cause = f"exited with status {code} before its work was done"
        line = last_place(self.logs / FOLDER, row["rank"], row["time"])
        return RankFailedError(f"{self._who(row)}: {cause}{line and f'; {line}'}", self._log(row["rank"]))

    def _hanging(self, errors: list[dict[str, Any]]) -> RankFailedError | None:
        """Return the error for ranks that do not respond, if the first error was a timeout; else None."""
        first = errors[0]
        stalled = [rank for rank in self.expected if rank not in {row["rank"] for row in errors}]
        if not is_a_wait(first["message"]) or not stalled or len(self.expected) < self.size:
            return None
        states_by_rank = diagnose_stalled(self.directory, stalled)
        who, states = ranks_text(list(states_by_rank)), "; ".join(dict.fromkeys(states_by_rank.values()))
        launch, is_started = self.launch, first.get("is_started", True)
        seconds = launch.timeout_seconds if is_started else launch.start_seconds
        flag = "--timeout" if is_started else launch.start_flag
        return RankFailedError(
            f"{who} of {self.size} did not arrive within {seconds:g} s ({flag}), "
            f"{states}; rank {first['rank']} waited in {_with_autopsy(first)}"
        )

    def _error(self, errors: list[dict[str, Any]]) -> EveryrankError:
        # skip ranks that their launcher stopped after a failure, and ranks that failed because another rank was lost
        running = [row for row in errors if row["kind"] != StoppedError.__name__] or errors
        first = next((row for row in running if not lost_another(row["message"])), running[0])
        kind = kind_named(first["kind"])
        log = self._log(first["rank"]) if first["has_frames"] else None
        # A wrong call or workload fails on every rank. An error on only some ranks is a failed run.
        same_errors = [row for row in errors if _location(row["message"]) == _location(first["message"])]
        is_on_some_ranks = issubclass(kind, UsageError) and len(same_errors) < len(self.expected)
        if is_on_some_ranks or kind is RankFailedError:
            return RankFailedError(f"{self._who(first)}: {_with_autopsy(first)}", log)
        return kind(_with_autopsy(first), log)

    def _who(self, row: dict[str, Any]) -> str:
        return f"rank {row['rank']} of {self.size} on {row['host']}"

    def _log(self, rank: int) -> Path | None:
        """Return the rank's log, if it has more than its first line."""
        path = self.logs / f"rank{rank}.log"
        return path if path.exists() and len(path.read_text(errors="replace").splitlines()) > 1 else None


def ranks_text(ranks: list[int]) -> str:
    """`rank 1`, `ranks 0, 2`."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def rank_of(path: Path) -> int:
    """Return the rank whose file this is: rank3.result."""
    return int(path.stem.removeprefix("rank"))


def exit_row(rank: int, code: int) -> dict[str, Any]:
    """Return the content of an exit file for a rank that has ended just now; code -N after signal N."""
    return {"rank": rank, "host": host_name(), "code": code, "time": time.time()}


def _with_autopsy(row: dict[str, Any]) -> str:
    """Return the message of a rank, and its diagnosis of the ranks that it waited for."""
    return f"{row['message']}; autopsy: {row['autopsy']}" if row.get("autopsy") else row["message"]


_LOCATION = re.compile(rf"{LOCATION_PATTERN}[\w.]+")


def _location(message: str) -> str:
    """`my_workload.py:12 in loss: RuntimeError`, without the text that may differ between ranks.

    A message without a location in code is cut before its last colon, and its numbers are replaced.
    """
    location = _LOCATION.search(message)
    start, colon, end = message.rpartition(": ")
    return location[0] if location else re.sub(r"\d+", "0", start if colon else end)
