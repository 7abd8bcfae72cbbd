"""Restart history: the ranks and hosts of each start of a training and the time lost, in memberships.jsonl.

A launcher restarts a training when a rank or host is lost or a new host joins; Slurm or the user may also restart it.
Rank 0 writes a row at each start, and completes it after the first update.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyrank.record import Membership
from everyrank.runs import open_file
from everyrank.world import World

__all__ = ["MEMBERSHIPS", "Memberships"]

MEMBERSHIPS = "memberships.jsonl"
_MAX_HOSTS = 8  # hosts named in a line
_MAX_LINES = 10_000  # lines of a file that are read


@dataclass(frozen=True)
class _Start:
    """A row of the file.

    since   time of the last update of the previous start, in seconds since 1970; None if there is no previous start
            or it finished, so that no time was lost
    """

    membership: Membership
    since: float | None


class Memberships:
    """All starts of one training up to this one, on rank 0 only."""

    def __init__(self, run: Path, world: World, start_step: int, say: Callable[[str], None]) -> None:
        # this start resumes after `start_step` updates; the log still has the rows of the previous start
        self.path, self.say = run / MEMBERSHIPS, say
        self.starts = _read_starts(self.path)
        is_over, num_logged, last_update_time = _read_log(run / "log.jsonl")
        previous_start = self.starts[-1] if self.starts and not is_over else None
        if previous_start is not None:
            last_update_time = max(
                filter(None, (last_update_time, _last_update_before(previous_start))),
                default=previous_start.membership.started,
            )
        hosts = list(dict.fromkeys(world.hosts))
        repeated = max(0, num_logged - start_step) if not is_over else 0
        membership = Membership(time.time(), world.size, hosts, start_step, repeated)
        self.starts.append(_Start(membership, last_update_time if previous_start is not None else None))
        self.previous = previous_start.membership if previous_start is not None else None
        self.is_waiting = True  # until the first update is done
        self._write()

    @property
    def rows(self) -> list[Membership]:
        """Return a row for each start, oldest first, as in the Record."""
        return [start.membership for start in self.starts]

    def first_update(self, now: float) -> None:
        """Record and print the time lost by the restart. Called after the first update."""
        if not self.is_waiting:
            return
        self.is_waiting = False
        start = self.starts[-1]
        if start.since is None:
            return
        lost = max(0.0, now - start.since)
        self.starts[-1] = dataclasses.replace(
            start, membership=dataclasses.replace(start.membership, lost_seconds=lost)
        )
        self._write()
        self.say(_restart_line(self.starts[-1].membership, self.previous))

    def _write(self) -> None:
        """Replace the file atomically. A file that cannot be written does not stop the training."""
        partial = self.path.with_name(f"{MEMBERSHIPS}.partial")
        rows = [dataclasses.asdict(start.membership) | {"since": start.since} for start in self.starts]
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)  # in a foreign folder it may be a link to another file
            with partial.open("x", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
            partial.replace(self.path)


def _last_update_before(start: _Start) -> float | None:
    """Return when a start did its first update, or if it did none, when the previous start did its last."""
    if start.since is None or start.membership.lost_seconds is None:
        return start.since
    return start.since + start.membership.lost_seconds


def _restart_line(membership: Membership, previous: Membership | None) -> str:
    ranks = f"{membership.world_size} rank{'s' * (membership.world_size != 1)}"
    hosts = ", ".join(membership.hosts) if len(membership.hosts) <= _MAX_HOSTS else f"{len(membership.hosts)} hosts"
    previous_size = (
        f" ({previous.world_size} before)"
        if previous is not None and previous.world_size != membership.world_size
        else ""
    )
    repeated = f"{membership.repeated_updates} update{'s' * (membership.repeated_updates != 1)} repeated"
    resumed = f"resumed after update {membership.first_update}, {repeated}, {membership.lost_seconds:,.0f} s lost"
    return f"{ranks} on {hosts}{previous_size}: {resumed}"


def _read_rows(path: Path) -> list[Any]:
    """Return the last rows of a JSON lines file, without lines that cannot be read."""
    rows: list[Any] = []
    with contextlib.suppress(OSError), open_file(path) as file:
        for line in file.read().decode(errors="replace").splitlines()[-_MAX_LINES:]:
            with contextlib.suppress(ValueError, RecursionError):
                rows.append(json.loads(line))
    return rows


def _read_starts(path: Path) -> list[_Start]:
    """Return the earlier starts. Rows with other fields are skipped, because the folder may be foreign."""
    starts = [_parse_start(row) for row in _read_rows(path)]
    return [start for start in starts if start is not None]


def _parse_start(row: Any) -> _Start | None:
    if not isinstance(row, dict):
        return None
    fields: dict[str, Any] = {field.name: row.get(field.name) for field in dataclasses.fields(Membership)}
    numbers = [fields["started"], fields["world_size"], fields["first_update"], fields["repeated_updates"]]
    optional_numbers = [value for value in (fields["lost_seconds"], row.get("since")) if value is not None]
    hosts = fields["hosts"]
    if not all(_is_number(value) for value in [*numbers, *optional_numbers]) or not all(
        isinstance(n, int) for n in numbers[1:]
    ):
        return None
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        return None
    return _Start(Membership(**fields), row.get("since"))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _read_log(path: Path) -> tuple[bool, int, float | None]:
    """Return whether the log shows a finished training, the number of updates in it, and the time of the last."""
    updates, last_time, is_over = 0, None, False
    for row in _read_rows(path):
        if not isinstance(row, dict):
            continue
        if "final" in row:
            is_over = True
        elif isinstance(row.get("step"), int) and _is_number(row.get("time")):
            updates, last_time, is_over = row["step"] + 1, row["time"], False
    return is_over, updates, last_time
