"""What rank processes and their supervisors leave in the job's folder, and the root cause of a failure.

rank3.pid      the process and its group; nothing where it is on another host
rank3.result   what the function returned
rank3.error    what it raised
rank3.exit     how the rank process ended, by its supervisor
rank3.kept     what it left for the case that there is no result
"""

from __future__ import annotations

import contextlib
import json
import pickle
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyrank.errors import EveryrankError, RankFailedError, StoppedError, UsageError, kind_named, signal_text
from everyrank.launch.host_info import host_name
from everyrank.launch.job import Launch
from everyrank.launch.stalled_ranks import diagnose_stalled, is_a_wait

__all__ = ["Reports", "exit_row", "rank_of", "ranks_text"]

_FILES_SECONDS = 5.0  # until what a rank on another host has written can be read here
# who was asked to end, or has aborted, often only answers to what another rank met
_ANSWERS = (-signal.SIGTERM, -signal.SIGABRT, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class Reports:
    """The files that ranks leave.

    directory         the job's folder
    logs              where the ranks' logs are
    size              ranks in all
    expected          those that report here
    launch            says how long one rank waits for another, for messages
    """

    directory: Path
    logs: Path
    size: int
    expected: range
    launch: Launch

    def results(self, needs_all: bool) -> dict[int, Any]:
        """What the function returned, by rank. Raises `RankFailedError` where there is none, or not each of them."""
        deadline = time.monotonic() + _FILES_SECONDS
        count = len(self.expected)
        while not (found := sorted(self.directory.glob("rank*.result"))) or (len(found) < count and needs_all):
            if time.monotonic() > deadline:
                raise RankFailedError(f"{count - len(found)} of {count} ranks left no result")
            time.sleep(0.05)
        return {
            rank_of(path): pickle.loads(path.read_bytes())  # noqa: S301
            for path in sorted(found, key=rank_of)
        }

    def not_started(self) -> list[int]:
        """Ranks that have given no sign yet."""
        there = {rank_of(path) for path in self.directory.glob("rank*.pid")}
        if len(there) >= len(self.expected):  # torchrun's c10d rendezvous decides which host has which ranks
            return []
        return [rank for rank in self.expected if rank not in there]

    def processes(self) -> list[tuple[int, int]]:
        """(process, group) of each rank process of this host."""
        rows = [path.read_text().split() for path in self.directory.glob("rank*.pid")]
        return [(int(row[0]), int(row[1])) for row in rows if len(row) == 2]

    def errors(self) -> list[dict[str, Any]]:
        """What the ranks reported, earliest first."""
        return self._rows("error")

    def dead(self, codes: Mapping[int, int | None]) -> list[dict[str, Any]]:
        """Ranks that ended without leaving a result or an error, earliest first.

        `codes` are those with which supervisors have ended, by rank, where they are known: one that was killed wrote
        nothing.
        """
        rows = self._rows("exit")
        written = {row["rank"] for row in rows}
        rows += [exit_row(rank, code) for rank, code in codes.items() if code and rank not in written]
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

    def root_cause(self, dead: list[dict[str, Any]]) -> EveryrankError | None:
        """What went wrong first: a rank process that was killed, else the earliest error. None where nobody said."""
        for row in dead:
            if row["code"] < 0 and row["code"] not in _ANSWERS:
                return self._died(row)
        for row in dead:
            if row["code"] not in _ANSWERS:
                return self._died(row)
        errors = self.errors()
        if errors:
            return self._hanging(errors) or self._error(errors)
        return self._died(dead[0]) if dead else None

    def _died(self, row: dict[str, Any]) -> RankFailedError:
        code = row["code"]
        if row.get("for_memory"):
            what = "killed for memory (SIGKILL): the machine, or its control group, has no more (oom_kill)"
        elif code < 0:
            what = f"ended by {signal_text(-code)}"
        else:
            what = f"exited with status {code} before its work was done"
        return RankFailedError(f"{self._who(row)}: {what}", self._log(row["rank"]))

    def _hanging(self, errors: list[dict[str, Any]]) -> RankFailedError | None:
        """Whom the first error was a wait for; None where it was none, or all have said something."""
        first = errors[0]
        silent = [rank for rank in self.expected if rank not in {row["rank"] for row in errors}]
        if not is_a_wait(first["message"]) or not silent or len(self.expected) < self.size:
            return None
        found = diagnose_stalled(self.directory, silent)
        who, states = ranks_text(list(found)), "; ".join(dict.fromkeys(found.values()))
        launch, is_started = self.launch, first.get("is_started", True)
        seconds = launch.timeout_seconds if is_started else launch.start_seconds
        flag = "--timeout" if is_started else launch.start_flag
        return RankFailedError(
            f"{who} of {self.size} did not come within {seconds:g} s ({flag}), "
            f"{states}; rank {first['rank']} waited in {_with_autopsy(first)}"
        )

    def _error(self, errors: list[dict[str, Any]]) -> EveryrankError:
        # ranks that stopped because their launcher asked them to, when another had failed
        first = next((row for row in errors if row["kind"] != StoppedError.__name__), errors[0])
        kind = kind_named(first["kind"])
        log = self._log(first["rank"]) if first["has_frames"] else None
        # A wrong call or workload is wrong on every rank; what one rank alone meets is a failed run.
        alike = [row for row in errors if _place(row["message"]) == _place(first["message"])]
        alone = issubclass(kind, UsageError) and len(alike) < len(self.expected)
        if alone or kind is RankFailedError:
            return RankFailedError(f"{self._who(first)}: {_with_autopsy(first)}", log)
        return kind(_with_autopsy(first), log)

    def _who(self, row: dict[str, Any]) -> str:
        return f"rank {row['rank']} of {self.size} on {row['host']}"

    def _log(self, rank: int) -> Path | None:
        """The rank's log, where there is more in it than its first line."""
        path = self.logs / f"rank{rank}.log"
        return path if path.exists() and len(path.read_text(errors="replace").splitlines()) > 1 else None


def ranks_text(ranks: list[int]) -> str:
    """`rank 1`, `ranks 0, 2`."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def rank_of(path: Path) -> int:
    """The rank whose file this is: rank3.result."""
    return int(path.stem.removeprefix("rank"))


def exit_row(rank: int, code: int) -> dict[str, Any]:
    """How a rank has ended just now, as its supervisor would write it down: -N after signal N."""
    return {"rank": rank, "host": host_name(), "code": code, "time": time.time()}


def _with_autopsy(row: dict[str, Any]) -> str:
    """What a rank reported, and what it found out about those that it waited for."""
    return f"{row['message']}; autopsy: {row['autopsy']}" if row.get("autopsy") else row["message"]


def _place(message: str) -> list[str]:
    """`my_workload.py:12 in loss: RuntimeError`, without what may differ from rank to rank."""
    return message.split(": ")[:-1]
