"""The paragraph that explains a hang from the `RankView` of each rank.

Ranks wait for each other in chains: rank 0 for rank 1 in one group, rank 1 for rank 2 in another. The paragraph reports
the end of the chain: a rank that is gone, stopped or failed; two ranks that call different collectives; a rank that is
in no collective. If all ranks still move, it reports the rank for which the others wait, and where that rank spends its
time.
"""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from everyrank.errors import is_user_code, printable
from everyrank.launch.autopsy.lateness import arrival_times, find_late_rank
from everyrank.launch.autopsy.rank_views import Frame, RankView
from everyrank.launch.stalled_ranks import concerns_others, is_a_wait

__all__ = ["location_text", "verdict"]

_DONE, _STARTED = 5, 7  # indexes in a row of `world.calls.recorded_calls`
_SHORT_WAIT_SECONDS = 1.0
_BUSY = 0.5  # CPU seconds per second; a process above it is computing
# operations with the same number of elements on each rank
_SAME_COUNT = ("all_reduce", "allreduce", "reduce", "broadcast", "all_gather", "allgather", "reduce_scatter")
_RULE = "all ranks of a group call the same collectives in the same order"
# (part of the file name, functions, message) for code of Python and torch that waits for something
_WAITS = (
    ("torch/utils/data/dataloader.py", ("_try_get_data", "_get_data", "_next_data"), "waits for its data loader"),
    ("everyrank/world/barrier.py", ("store_barrier",), "waits for the others at a barrier of everyrank"),
    ("everyrank/world/barrier.py", ("_wait_for_text",), "waits for a message of another rank"),
    ("torch/distributed/distributed_c10d.py", ("_store_based_barrier",), "waits for the others to make the same group"),
    ("torch/distributed/distributed_c10d.py", ("_new_process_group_helper",), "waits for the others to make the group"),
    ("torch/distributed/rendezvous.py", ("_create_c10d_store",), "waits for the others in init_process_group"),
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
    location: str  # in the user's code; "" if unknown

    def text(self) -> str:
        """`all_reduce of 8 elements of float32`."""
        elements = (
            f" of {self.num_elements:,} element{'s' * (self.num_elements != 1)} of {self.dtype}" if self.dtype else ""
        )
        return f"{self.operation}{elements}"

    def differs(self, other: _Call) -> str:
        """Return the first difference between two calls: operation, dtype or size; "" if there is none."""
        if self.operation != other.operation:
            return "operation"
        if self.dtype != other.dtype and self.dtype and other.dtype:
            return "dtype"
        has_same_size = self.num_elements == other.num_elements or not self.operation.startswith(_SAME_COUNT)
        return "" if has_same_size else "size"


class _Wait(NamedTuple):
    """A collective in which some ranks wait. `missing` ranks did not reach it; `other` ranks called a different one."""

    group: str
    ranks: list[int]
    call: _Call
    waiting: list[int]
    missing: list[int]
    other: dict[int, _Call]


class _Message(NamedTuple):
    """A message that a rank waits for, or that its peer does not take. `peer` is None for one from any rank."""

    is_recv: bool
    peer: int | None
    text: str


_MESSAGE = re.compile(r"(recv from|send to) (\d+|any rank)")


def _message(view: RankView) -> _Message | None:
    """Return the message in which a rank waits; None if it waits in none."""
    for row in reversed(view.calls.get("calls", [])):
        _, _, operation, count, dtype, is_done, is_message, _, _ = row
        match = _MESSAGE.fullmatch(str(operation)) if is_message and not is_done else None
        if match is not None:
            peer = int(match[2]) if match[2].isdecimal() else None
            text = f"message of {count:,} element{'s' * (count != 1)} of {dtype}"
            return _Message(match[1] == "recv from", peer, text)
    return None


def verdict(views: Sequence[RankView]) -> str:
    """One paragraph about these ranks: first the cause, then the ranks that wait for it."""
    waits = _waits(views)
    by_rank = {view.rank: view for view in views}
    waiters = {rank for wait in waits for rank in wait.waiting}
    for candidates in (
        [_stopped_or_gone(view) for view in views],
        [_slow(views, waits)],
        [_mismatch(wait, by_rank) for wait in waits if wait.other],
        [_never_came(wait, by_rank, waiters) for wait in waits if wait.missing and not set(wait.missing) <= waiters],
        [_never_sent(view, by_rank) for view in views],
        [_deadlock(waits, by_rank)],
    ):
        causes = list(dict.fromkeys(row for row in candidates if row))
        if causes:
            earlier = _earlier_calls(waits, by_rank) if any(view.aborted for view in views) else []
            return printable(". ".join([*causes, *_where_others_wait(waits, by_rank, causes), *earlier]))
    stands = "; ".join(f"rank {view.rank} {_state_text(view)}" for view in views)
    complete = [wait for wait in waits if not wait.missing]
    if complete:
        wait = complete[0]
        return printable(f"all ranks have reached {_name(wait, by_rank)}, but it does not end: {stands}")
    return printable(f"no rank is known to wait in a collective: {stands}")


def _calls(view: RankView) -> dict[str, list[_Call]]:
    """Return the collectives of a rank by group, oldest first, without point-to-point messages."""
    by_group: dict[str, list[_Call]] = {}
    last = ""
    for row in view.calls.get("calls", []):
        group, number, operation, count, dtype, is_done, is_message, _, frame = row
        if not is_message:
            call = _Call(
                number, str(operation), count, str(dtype), bool(is_done), location_text([frame] if frame else [])
            )
            by_group.setdefault(str(group), []).append(call)
            last = str(group)
    has_pending = any(not call.is_done for calls in by_group.values() for call in calls)
    # The error raised at a barrier of everyrank may be that of another rank.
    if concerns_others(view.raised) and by_group and not has_pending and not _is_at_barrier(view):
        # It waited in its last collective, which the Flight Recorder drops after an error.
        by_group[last][-1] = by_group[last][-1]._replace(is_done=False)
    return by_group


def _is_at_barrier(view: RankView) -> bool:
    """Whether a rank waits, or has raised, at a barrier of everyrank, not in a collective."""
    inner = itertools.takewhile(lambda frame: not is_user_code(frame[0]), view.frames)
    return any("everyrank/world/barrier.py" in Path(file).as_posix() for file, _, _ in inner)


def _waits(views: Sequence[RankView]) -> list[_Wait]:
    """Return the first collective of each group in which a rank waits."""
    calls_by_rank = {view.rank: _calls(view) for view in views}
    groups: dict[str, list[int]] = {}
    for view in views:
        groups.update({name: list(map(int, ranks)) for name, ranks in view.calls.get("groups", {}).items()})
    waits: list[_Wait] = []
    for group, ranks in groups.items():
        pending = {
            rank: next((call for call in calls_by_rank.get(rank, {}).get(group, []) if not call.is_done), None)
            for rank in ranks
        }
        waiting = {rank: call for rank, call in pending.items() if call is not None}
        if not waiting:
            continue
        first = min(waiting.values(), key=lambda call: call.number)
        waiting = {rank: call for rank, call in waiting.items() if call.number == first.number}
        waits.append(_wait(group, ranks, first, sorted(waiting), calls_by_rank))
    return waits


def _wait(
    group: str, ranks: list[int], call: _Call, waiting: list[int], calls_by_rank: dict[int, dict[str, list[_Call]]]
) -> _Wait:
    missing: list[int] = []
    other: dict[int, _Call] = {}
    for rank in ranks:
        calls = calls_by_rank.get(rank, {}).get(group, [])
        if not calls or calls[-1].number < call.number:
            missing.append(rank)
            continue
        rank_call = next((candidate for candidate in calls if candidate.number == call.number), call)
        if rank_call.differs(call):
            other[rank] = rank_call
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


def _stopped_or_gone(view: RankView) -> str:
    """Return the cause if a rank is stopped, aborted, or gone without an error; else ""."""
    if view.state == "stopped":
        return f"rank {view.rank} is stopped by a signal (kill -CONT {view.pid} resumes it): it {_last_seen_text(view)}"
    if view.aborted:
        return (
            f"rank {view.rank} was aborted by a C library: it {_last_seen_text(view)}; gloo aborts if another rank "
            "sends more than this one expects, which is a mismatch of size or dtype"
        )
    if view.state == "gone" and not view.raised and not view.ended:
        return f"rank {view.rank} ended without an error (process {view.pid} was killed): it {_last_seen_text(view)}"
    return ""


def _slow(views: Sequence[RankView], waits: Sequence[_Wait]) -> str:
    """Return the rank for which the others wait again and again, and where it spends its time; "" if there is none.

    A wait that is much longer than the earlier ones is a hang. Arrivals are compared only on one host, because clocks
    of different hosts differ.
    """
    if len({view.host for view in views}) > 1 or any(view.raised or view.ended for view in views):
        return ""
    by_rank = {view.rank: view for view in views}
    known = [by_rank[rank].calls if rank in by_rank else {} for rank in range(views[0].size)]
    late = find_late_rank([arrival_times(calls) if "groups" in calls else {} for calls in known])
    if late is None or not late.is_slow or any(wait.other for wait in waits):
        return ""
    started = [row[_STARTED] for calls in known for row in calls.get("calls", []) if not row[_DONE]]
    waited = time.time() - 1e-9 * min(started, default=1e9 * time.time())
    if waited > max(_SHORT_WAIT_SECONDS, 2 * late.longest_seconds):
        return ""
    others = [view for view in views if view.rank != late.rank]
    return (
        f"no rank is stuck, but rank {late.rank} is slower than the others: they waited for it "
        f"{late.wait_fraction:.0%} of the last {late.window_seconds:.1f} s (it causes {late.lateness_fraction:.0%} of "
        f"all lateness, {late.mean_seconds:.3f} s each time). {_most_time(by_rank[late.rank], others)}"
    )


def _most_time(view: RankView, others: Sequence[RankView]) -> str:
    """`It spends 70% of its time at data.py:12 in load (it waits for a thread or a lock), the others 0%`."""

    def share(some_view: RankView, location: str) -> float:
        return sum(count for count, frames in some_view.locations if location_text(frames) == location) / (
            some_view.num_samples or 1
        )

    rows = [(location_text(frames), _activity_of(frames)) for _, frames in view.locations]
    usual_shares = {location: statistics.median(share(other, location) for other in others) for location, _ in rows}
    location, activity = max(rows, key=lambda row: share(view, row[0]) - usual_shares[row[0]], default=("", ""))
    if not location or share(view, location) <= usual_shares[location]:
        return f"rank {view.rank} {_state_text(view)}"
    return (
        f"rank {view.rank} was at {location} in {share(view, location):.0%} of the {view.num_samples} stack samples "
        f"of the last minute{activity and f' (it {activity})'}, the others in {usual_shares[location]:.0%}"
    )


def _mismatch(wait: _Wait, by_rank: dict[int, RankView]) -> str:
    rank, call = next(iter(wait.other.items()))
    first = next(other for other in wait.ranks if other not in wait.other and other not in wait.missing)
    kinds = {"operation": "different operation or order", "dtype": "different dtype", "size": "different size"}
    size = next(iter(by_rank.values())).size
    who = f"all {size} ranks" if len(wait.ranks) == size else _ranks(wait.ranks)
    locations = {
        number: row.location or location_text(by_rank[number].frames)
        for number, row in ((first, wait.call), (rank, call))
    }
    return (
        f"mismatch ({kinds[call.differs(wait.call)]}): collective {wait.call.number} of the group of {who} is "
        f"{wait.call.text()} on rank {first}, at {locations[first]}, and {call.text()} on rank {rank}, at "
        f"{locations[rank]}; {_RULE}"
    )


def _never_came(wait: _Wait, by_rank: dict[int, RankView], waiters: set[int]) -> str:
    """Return the cause if ranks did not reach a collective and wait in none: the end of the chain."""
    missing = [rank for rank in wait.missing if rank not in waiters]
    texts: list[str] = []
    for rank in missing[:4]:
        view, who = by_rank.get(rank), "it" if len(missing) == 1 else f"rank {rank}"
        texts.append(f"{who} {_state_text(view) if view is not None else 'has written no readable state'}")
    more = f"; and {len(missing) - 4} more" if len(missing) > 4 else ""
    return f"{_ranks(missing)} never reached {_name(wait, by_rank)}: {'; '.join(texts)}{more}"


def _never_sent(view: RankView, by_rank: dict[int, RankView]) -> str:
    """Return the cause if a rank waits for a message, and its peer does something else; else ""."""
    message = _message(view)
    if message is None or message.peer is None:
        return ""
    peer = by_rank.get(message.peer)
    other = _message(peer) if peer is not None else None
    did = "never sent" if message.is_recv else "never received"
    if other is not None and other.peer == view.rank and message.is_recv == other.is_recv:
        first, second = sorted((view, by_rank[message.peer]), key=lambda each: each.rank)
        verb = "receive from" if message.is_recv else "send to"
        return (
            f"ranks {first.rank} and {second.rank} both {verb} each other, and neither {did[6:]}: rank {first.rank} "
            f"at {location_text(first.frames)}, rank {second.rank} at {location_text(second.frames)}"
        )
    stands = _state_text(peer) if peer is not None else "has written no readable state"
    preposition = "waits for" if message.is_recv else "sends"
    return (
        f"rank {message.peer} {did} the {message.text} that rank {view.rank} {preposition} at "
        f"{location_text(view.frames) or 'an unknown location'}: it {stands}"
    )


def _deadlock(waits: Sequence[_Wait], by_rank: dict[int, RankView]) -> str:
    """Return the cause if ranks wait for each other, each in a different group."""
    stuck = [wait for wait in waits if wait.missing]
    if not stuck:
        return ""
    texts = [
        f"rank {rank} waits in {_name(wait, by_rank)}, to which {_ranks(wait.missing)} never came, at "
        f"{location_text(by_rank[rank].frames) or 'an unknown location'}"
        for wait in stuck
        for rank in wait.waiting[:1]
    ]
    return f"mismatch (groups in different order): {'; '.join(texts)}; {_RULE}, also across groups that share ranks"


def _where_others_wait(waits: Sequence[_Wait], by_rank: dict[int, RankView], causes: Sequence[str]) -> list[str]:
    """`rank 0 waits in all_reduce ..., at train.py:36 in main`, for ranks that `causes` does not mention."""
    text = " ".join(causes)
    rows: list[str] = []
    for wait in waits:
        ranks_by_location: dict[str, list[int]] = {}
        for rank in wait.waiting:
            if f"on rank {rank}, at" not in text and f"rank {rank} waits in" not in text:
                location = _waits_at(by_rank[rank], wait) or "an unknown location"
                ranks_by_location.setdefault(location, []).append(rank)
        for location, ranks in ranks_by_location.items():
            verb = "waits" if len(ranks) == 1 else "wait"
            name = _name(wait, by_rank)
            rows.append(f"{_ranks(ranks)} {verb} in {'it' if name in text else name}, at {location}")
    return rows


def _waits_at(view: RankView, wait: _Wait) -> str:
    """`train.py:40 in main (called at train.py:31 in step)`: NCCL does not block the host, which continues."""
    location = location_text(view.frames)
    calls = _calls(view).get(wait.group, [])
    called = next((call.location for call in calls if call.number == wait.call.number), "")
    return f"{location} (called at {called})" if called and called != location else location


def _earlier_calls(waits: Sequence[_Wait], by_rank: dict[int, RankView]) -> list[str]:
    """`before it, rank 0 called all_gather of 5 elements of float32, collective 2`, if that was a different call.

    If gloo ends a rank because the sizes of a gather differ, the gather may have succeeded on the others, which then
    wait in the next collective.
    """
    rows: list[str] = []
    for wait in waits:
        rank = wait.waiting[0]
        earlier = [call for call in _calls(by_rank[rank])[wait.group] if call.number == wait.call.number - 1]
        if earlier and earlier[0].text() != wait.call.text():
            rows.append(f"before it, rank {rank} called {earlier[0].text()}, collective {earlier[0].number}")
    return rows


def _last_seen_text(view: RankView) -> str:
    location = location_text(view.frames)
    if not location:
        return "was never seen"
    when = f", {view.age:.0f} s ago," if view.age >= 1.0 else ""
    return f"was last seen{when} at {location}"


def _state_text(view: RankView) -> str:
    """Return what a rank does, and where in the user's code: `is at train.py:31 in main (it computes, process 7)`."""
    if view.ended:
        return "has ended its work"
    location = location_text(view.frames)
    if concerns_others(view.raised) and _is_at_barrier(view):
        return f"waited at a barrier of everyrank, at {location or 'an unknown location'}"
    if concerns_others(view.raised):
        ending = "timed out" if is_a_wait(view.raised) else "was ended by an error of another rank"
        return f"{ending} at {location or 'an unknown location'}"
    if view.raised:
        return f"has raised at {location or 'an unknown location'}: {view.raised}"
    if view.age:
        return _last_seen_text(view)
    message = _message(view)
    if message is not None:
        who = "any rank" if message.peer is None else f"rank {message.peer}"
        activity = (
            f"it waits for a {message.text} from {who}" if message.is_recv else f"it sends a {message.text} to {who}"
        )
    else:
        activity = _activity(view)
    worker = next((f"; its worker, process {pid}, at {location_text(frames)}" for pid, frames in view.workers), "")
    worker = worker if "loader" in activity else ""
    return f"is at {location or 'an unknown location'} ({activity}, process {view.pid}{worker})"


def _activity(view: RankView) -> str:
    """Return what a rank does according to its innermost frames, else to its process."""
    if text := _activity_of(view.frames):
        return f"it {text}"
    if view.busy > _BUSY or view.state == "running":
        return "it computes"
    return "it waits for a disk or a driver" if view.state == "waiting for a disk" else "it waits"


def _activity_of(frames: Sequence[Frame]) -> str:
    """`waits for its data loader`, by the frames inside the innermost one of user code; "" if unknown."""
    inner = list(itertools.takewhile(lambda frame: not is_user_code(frame[0]), frames))
    for file_part, functions, text in _WAITS:
        if any(file_part in Path(file).as_posix() and function in functions for file, _, function in inner):
            return text
    return ""


def location_text(frames: Sequence[Frame]) -> str:
    """`train.py:31 in main`: the innermost frame in user code, else in everyrank, else of all."""
    user_frames = [frame for frame in frames if is_user_code(frame[0])]
    everyrank_frames = [frame for frame in frames if "everyrank" in Path(frame[0]).parts]
    if not frames:
        return ""
    file, line, function = (user_frames or everyrank_frames or list(frames))[0]
    return f"{Path(file).name}:{line} in {function}"
