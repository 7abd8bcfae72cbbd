"""Who took part in each start of a training, and what every change has cost: memberships.jsonl in its folder.

A training is started again by a launcher (a rank or a host was lost, a new one came), by Slurm's queue, or by a person.
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
_MOST_HOSTS = 8  # that are named in a line
_MOST_LINES = 10_000  # of a file that are looked at


@dataclass(frozen=True)
class _Start:
    """A row of the file.

    since   when the start before this one did its last update, in seconds since 1970; None: nothing was lost, because
            there is none before, or it came to its end
    """

    membership: Membership
    since: float | None


class Memberships:
    """The starts of one training, of which this is the last one; rank 0 alone has them.

    rows   the same as in the Record
    """

    def __init__(self, run: Path, world: World, begin: int, say: Callable[[str], None]) -> None:
        # `begin` updates are done where this start goes on; the log is still as the start before has left it
        self.path, self.say = run / MEMBERSHIPS, say
        self.starts = _read(self.path)
        is_over, logged, last = _logged(run / "log.jsonl")
        before = self.starts[-1] if self.starts and not is_over else None
        if before is not None:
            last = max(filter(None, (last, _went_on_at(before))), default=before.membership.started)
        hosts = list(dict.fromkeys(world.hosts))
        repeated = max(0, logged - begin) if not is_over else 0
        own = Membership(time.time(), world.size, hosts, begin, repeated)
        self.starts.append(_Start(own, last if before is not None else None))
        self.had = before.membership if before is not None else None
        self.is_waiting = True  # for the first update
        self._write()

    @property
    def rows(self) -> list[Membership]:
        """One for each start, oldest first."""
        return [start.membership for start in self.starts]

    def first_update(self, now: float) -> None:
        """The first update of this start is done: what the change has cost is known, and said."""
        if not self.is_waiting:
            return
        self.is_waiting = False
        own = self.starts[-1]
        if own.since is None:
            return
        lost = max(0.0, now - own.since)
        self.starts[-1] = dataclasses.replace(own, membership=dataclasses.replace(own.membership, lost_seconds=lost))
        self._write()
        self.say(_line(self.starts[-1].membership, self.had))

    def _write(self) -> None:
        """Whole or not at all. A file that cannot be written is no reason to stop training."""
        partial = self.path.with_name(f"{MEMBERSHIPS}.partial")
        rows = [dataclasses.asdict(start.membership) | {"since": start.since} for start in self.starts]
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)  # in a folder from elsewhere it may be a link to a file of the person's own
            with partial.open("x", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
            partial.replace(self.path)


def _went_on_at(start: _Start) -> float | None:
    """When that start did its first update; of one that did none, when the one before it did its last."""
    if start.since is None or start.membership.lost_seconds is None:
        return start.since
    return start.since + start.membership.lost_seconds


def _line(now: Membership, before: Membership | None) -> str:
    ranks = f"{now.world_size} rank{'s' * (now.world_size != 1)}"
    hosts = ", ".join(now.hosts) if len(now.hosts) <= _MOST_HOSTS else f"{len(now.hosts)} hosts"
    was = f" ({before.world_size} before)" if before is not None and before.world_size != now.world_size else ""
    repeated = f"{now.repeated_updates} update{'s' * (now.repeated_updates != 1)} repeated"
    return (
        f"{ranks} on {hosts}{was}: going on after update {now.first_update}, {repeated}, {now.lost_seconds:,.0f} s lost"
    )


def _lines(path: Path) -> list[Any]:
    """The last rows of a file of JSON lines that can be read; what a killed run has cut off is left out."""
    rows: list[Any] = []
    with contextlib.suppress(OSError), open_file(path) as file:
        for line in file.read().decode(errors="replace").splitlines()[-_MOST_LINES:]:
            with contextlib.suppress(ValueError, RecursionError):
                rows.append(json.loads(line))
    return rows


def _read(path: Path) -> list[_Start]:
    """The starts before this one. A folder may come from anywhere: what is no row of ours is left out."""
    found = [_start(row) for row in _lines(path)]
    return [start for start in found if start is not None]


def _start(row: Any) -> _Start | None:
    if not isinstance(row, dict):
        return None
    fields: dict[str, Any] = {field.name: row.get(field.name) for field in dataclasses.fields(Membership)}
    numbers = [fields["started"], fields["world_size"], fields["first_update"], fields["repeated_updates"]]
    maybe = [value for value in (fields["lost_seconds"], row.get("since")) if value is not None]
    hosts = fields["hosts"]
    if not all(_is_number(value) for value in [*numbers, *maybe]) or not all(isinstance(n, int) for n in numbers[1:]):
        return None
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        return None
    return _Start(Membership(**fields), row.get("since"))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _logged(path: Path) -> tuple[bool, int, float | None]:
    """(whether the log ends with the end of a training, updates in it, when the last was done)."""
    updates, last, is_over = 0, None, False
    for row in _lines(path):
        if not isinstance(row, dict):
            continue
        if "final" in row:
            is_over = True
        elif isinstance(row.get("step"), int) and _is_number(row.get("time")):
            updates, last, is_over = row["step"] + 1, row["time"], False
    return is_over, updates, last
