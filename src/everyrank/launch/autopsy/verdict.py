"""The paragraph: what is known of all ranks, and what follows from it.

Ranks wait for each other in chains: rank 0 for rank 1 in one group, rank 1 for rank 2 in another. What is told is the
end of the chain: a rank that is gone, stopped or failed; two that call different collectives; one that came to none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from everyrank.errors import is_own, printable
from everyrank.launch.autopsy.look import Frame, RankView
from everyrank.launch.stalled_ranks import concerns_others

__all__ = ["verdict"]

_BUSY = 0.5  # CPU seconds a second, from which on a process computes
# of these each rank hands in as much as any other
_SAME_COUNT = ("all_reduce", "allreduce", "reduce", "broadcast", "all_gather", "allgather", "reduce_scatter")
_RULE = "all ranks of a group call the same collectives in the same order"
# (a part of the file's name, functions) of Python and torch in which one waits for something else than a collective
_WAITS = (
    ("torch/utils/data/dataloader.py", ("_try_get_data", "_get_data", "_next_data"), "waits for its data loader"),
    ("everyrank/world/barrier.py", ("store_barrier",), "waits for the others at a barrier of everyrank's"),
    ("everyrank/world/barrier.py", ("_wait_for_text",), "waits for the word of another rank"),
    ("torch/distributed/distributed_c10d.py", ("_store_based_barrier",), "waits for the others to make the same group"),
    ("threading.py", ("wait", "acquire", "join"), "waits for a thread or a lock"),
    ("subprocess.py", ("wait", "_wait", "communicate"), "waits for a process that it has started"),
    ("multiprocessing/", ("wait", "poll", "join", "recv", "get"), "waits for a process that it has started"),
)


class _Call(NamedTuple):
    number: int
    operation: str
    num_elements: int
    dtype: str
    is_done: bool
    place: str  # in the person's code; empty where that was not asked for

    def text(self) -> str:
        """`all_reduce of 8 elements of float32`."""
        of = f" of {self.num_elements:,} element{'s' * (self.num_elements != 1)} of {self.dtype}" if self.dtype else ""
        return f"{self.operation}{of}"

    def differs(self, other: _Call) -> str:
        """In what it is another call than that; empty where it is the same."""
        if self.operation != other.operation:
            return "operation"
        if self.dtype != other.dtype and self.dtype and other.dtype:
            return "dtype"
        is_alike = self.num_elements == other.num_elements or not self.operation.startswith(_SAME_COUNT)
        return "" if is_alike else "size"


class _Wait(NamedTuple):
    """A collective that some ranks of a group are in. `missing` have not come to it; `other` call something else."""

    group: str
    ranks: list[int]
    call: _Call
    waiting: list[int]
    missing: list[int]
    other: dict[int, _Call]


def verdict(views: Sequence[RankView]) -> str:
    """One paragraph about these ranks, in an order of its own: the cause first, then who waits for it."""
    waits = _waits(views)
    by_rank = {view.rank: view for view in views}
    waiters = {rank for wait in waits for rank in wait.waiting}
    for rows in (
        [_of_unwell(view) for view in views],
        [_of_mismatch(wait, by_rank) for wait in waits if wait.other],
        [_of_missing(wait, by_rank, waiters) for wait in waits if wait.missing and not set(wait.missing) <= waiters],
        [_of_circle(waits, by_rank)],
    ):
        causes = list(dict.fromkeys(row for row in rows if row))
        if causes:
            return printable(". ".join([*causes, *_where_others_wait(waits, by_rank, causes)]))
    places = "; ".join(f"rank {view.rank} {_stands(view)}" for view in views)
    all_in = [wait for wait in waits if not wait.missing]
    if all_in:
        wait = all_in[0]
        return printable(f"all ranks have come to {_name(wait, by_rank)} and it does not end: {places}")
    return printable(f"no rank is known to wait in a collective: {places}")


def _calls(view: RankView) -> dict[str, list[_Call]]:
    """Its collectives by group, the oldest first; messages are left out: nobody else calls them."""
    found: dict[str, list[_Call]] = {}
    last = ""
    for row in view.calls.get("calls", []):
        group, number, operation, count, dtype, is_done, is_message, _, place = row
        if not is_message:
            call = _Call(number, str(operation), count, str(dtype), bool(is_done), _place([place] if place else []))
            found.setdefault(str(group), []).append(call)
            last = str(group)
    is_known = any(not call.is_done for calls in found.values() for call in calls)
    # what a rank raises at a barrier of ours may be the error of another one, which it was told there
    if concerns_others(view.raised) and found and not is_known and not _is_at_barrier(view):
        # it has waited in vain in the last one, which was taken away from the Flight Recorder with the error
        found[last][-1] = found[last][-1]._replace(is_done=False)
    return found


def _is_at_barrier(view: RankView) -> bool:
    """Whether it waits, or has raised, at a barrier of everyrank's: not in a collective."""
    inner = itertools.takewhile(lambda frame: not is_own(frame[0]), view.frames)
    return any("everyrank/world/barrier.py" in Path(file).as_posix() for file, _, _ in inner)


def _waits(views: Sequence[RankView]) -> list[_Wait]:
    """For each group the first collective in which a rank of it waits."""
    of_ranks = {view.rank: _calls(view) for view in views}
    groups: dict[str, list[int]] = {}
    for view in views:
        groups.update({name: list(map(int, ranks)) for name, ranks in view.calls.get("groups", {}).items()})
    found: list[_Wait] = []
    for group, ranks in groups.items():
        pending = {
            rank: next((call for call in of_ranks.get(rank, {}).get(group, []) if not call.is_done), None)
            for rank in ranks
        }
        waiting = {rank: call for rank, call in pending.items() if call is not None}
        if not waiting:
            continue
        first = min(waiting.values(), key=lambda call: call.number)
        waiting = {rank: call for rank, call in waiting.items() if call.number == first.number}
        found.append(_wait(group, ranks, first, sorted(waiting), of_ranks))
    return found


def _wait(
    group: str, ranks: list[int], call: _Call, waiting: list[int], of_ranks: dict[int, dict[str, list[_Call]]]
) -> _Wait:
    missing: list[int] = []
    other: dict[int, _Call] = {}
    for rank in ranks:
        calls = of_ranks.get(rank, {}).get(group, [])
        if not calls or calls[-1].number < call.number:
            missing.append(rank)
            continue
        own = next((one for one in calls if one.number == call.number), call)
        if own.differs(call):
            other[rank] = own
    return _Wait(group, ranks, call, waiting, missing, other)


def _name(wait: _Wait, by_rank: dict[int, RankView]) -> str:
    """`all_reduce of 8 elements of float32, collective 5 of the group of all 2 ranks`."""
    size = next(iter(by_rank.values())).size
    who = f"all {size} ranks" if len(wait.ranks) == size else _ranks(wait.ranks)
    return f"{wait.call.text()}, collective {wait.call.number} of the group of {who}"


def _ranks(ranks: Sequence[int]) -> str:
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _of_unwell(view: RankView) -> str:
    """Of a rank that is stopped, or gone without a word."""
    if view.state == "stopped":
        return f"rank {view.rank} is stopped by a signal (kill -CONT {view.pid} lets it go on): it {_stood(view)}"
    if view.aborted:
        return (
            f"rank {view.rank} was ended by a library, in C: it {_stood(view)}; gloo does so where another rank sends "
            "more than this one expects: a mismatch of size or dtype"
        )
    if view.state == "gone" and not view.raised and not view.ended:
        return f"rank {view.rank} is gone without a word (process {view.pid} was killed): it {_stood(view)}"
    return ""


def _of_mismatch(wait: _Wait, by_rank: dict[int, RankView]) -> str:
    rank, call = next(iter(wait.other.items()))
    first = next(one for one in wait.ranks if one not in wait.other and one not in wait.missing)
    what = {"operation": "another operation or in another order", "dtype": "another dtype", "size": "another size"}
    size = next(iter(by_rank.values())).size
    who = f"all {size} ranks" if len(wait.ranks) == size else _ranks(wait.ranks)
    places = {one: its.place or _place(by_rank[one].frames) for one, its in ((first, wait.call), (rank, call))}
    return (
        f"mismatch ({what[call.differs(wait.call)]}): collective {wait.call.number} of the group of {who} is "
        f"{wait.call.text()} on rank {first}, at {places[first]}, and {call.text()} on rank {rank}, at {places[rank]}; "
        f"{_RULE}"
    )


def _of_missing(wait: _Wait, by_rank: dict[int, RankView], waiters: set[int]) -> str:
    """Of ranks that wait in no collective themselves: the end of the chain."""
    missing = [rank for rank in wait.missing if rank not in waiters]
    parts: list[str] = []
    for rank in missing[:4]:
        view, who = by_rank.get(rank), "it" if len(missing) == 1 else f"rank {rank}"
        parts.append(f"{who} {_stands(view) if view is not None else 'has left nothing that could be read'}")
    more = f"; and {len(missing) - 4} more" if len(missing) > 4 else ""
    return f"{_ranks(missing)} never came to {_name(wait, by_rank)}: {'; '.join(parts)}{more}"


def _of_circle(waits: Sequence[_Wait], by_rank: dict[int, RankView]) -> str:
    """Of ranks that wait for each other, each in another group."""
    stuck = [wait for wait in waits if wait.missing]
    if not stuck:
        return ""
    parts = [
        f"rank {rank} waits in {_name(wait, by_rank)}, to which {_ranks(wait.missing)} never came, at "
        f"{_place(by_rank[rank].frames) or 'a place that is not known'}"
        for wait in stuck
        for rank in wait.waiting[:1]
    ]
    return f"mismatch (groups in another order): {'; '.join(parts)}; {_RULE}, and groups that share ranks, too"


def _where_others_wait(waits: Sequence[_Wait], by_rank: dict[int, RankView], causes: Sequence[str]) -> list[str]:
    """`rank 0 waits in all_reduce ..., at train.py:36 in main`, for those of whom nothing is said yet."""
    told = " ".join(causes)
    rows: list[str] = []
    for wait in waits:
        places: dict[str, list[int]] = {}
        for rank in wait.waiting:
            if f"on rank {rank}, at" not in told and f"rank {rank} waits in" not in told:
                places.setdefault(_place(by_rank[rank].frames) or "a place that is not known", []).append(rank)
        for place, ranks in places.items():
            verb = "waits" if len(ranks) == 1 else "wait"
            name = _name(wait, by_rank)
            rows.append(f"{_ranks(ranks)} {verb} in {'it' if name in told else name}, at {place}")
    return rows


def _stood(view: RankView) -> str:
    place = _place(view.frames)
    if not place:
        return "was never seen"
    when = f", {view.age:.0f} s ago," if view.age >= 1.0 else ""
    return f"was last seen{when} at {place}"


def _stands(view: RankView) -> str:
    """What a rank does, and where in the person's code: `stands at train.py:31 in main (it computes, process 7)`."""
    if view.ended:
        return "has ended its work"
    place = _place(view.frames)
    if concerns_others(view.raised) and _is_at_barrier(view):
        return f"waited at a barrier of everyrank's, at {place or 'a place that is not known'}"
    if concerns_others(view.raised):
        return f"waited in vain at {place or 'a place that is not known'}"
    if view.raised:
        return f"has raised at {place or 'a place that is not known'}: {view.raised}"
    if view.age:
        return _stood(view)
    doing = _doing(view)
    worker = next((f"; its worker, process {pid}, at {_place(frames)}" for pid, frames in view.workers), "")
    worker = worker if "loader" in doing else ""
    return f"stands at {place or 'a place that is not known'} ({doing}, process {view.pid}{worker})"


def _doing(view: RankView) -> str:
    """In the words of its innermost frames, else by its process."""
    inner: list[Frame] = []
    for frame in view.frames:
        if is_own(frame[0]):
            break
        inner.append(frame)
    for part, functions, text in _WAITS:
        if any(part in Path(file).as_posix() and function in functions for file, _, function in inner):
            return f"it {text}"
    if view.busy > _BUSY or view.state == "running":
        return "it computes"
    return "it waits for a disk or a driver" if view.state == "waiting for a disk" else "it waits"


def _place(frames: Sequence[Frame]) -> str:
    """`train.py:31 in main`: the innermost frame of the person's own code, else of everyrank's, else of all."""
    own = [frame for frame in frames if is_own(frame[0])]
    ours = [frame for frame in frames if "everyrank" in Path(frame[0]).parts]
    if not frames:
        return ""
    file, line, function = (own or ours or list(frames))[0]
    return f"{Path(file).name}:{line} in {function}"
