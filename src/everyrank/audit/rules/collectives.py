"""Checks that all ranks call the same collectives in the same order, and reports where a hanging run is blocked."""

from __future__ import annotations

from collections.abc import Sequence

from everyrank.audit.events import CollectiveCall
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings, short_location

__all__ = ["check_collectives"]

_POINT_TO_POINT = ("send", "recv")
# collectives whose shapes may differ between ranks: the root passes a list, or ranks send different numbers of rows
_UNEVEN_SHAPES = ("gather_", "scatter_", "alltoall_", "alltoall_base_", "all_to_all_single")


def check_collectives(evidence: Evidence, findings: Findings) -> None:
    """Compare the collectives of each group, in the order in which each rank calls them."""
    for group in sorted(evidence.groups):
        calls = {
            rank: [
                event
                for event in evidence.of(rank, CollectiveCall)
                if event.group == group and not event.op.startswith(_POINT_TO_POINT)
            ]
            for rank in evidence.ranks
        }
        calls = {rank: events for rank, events in calls.items() if events}
        if len(calls) > 1:
            _compare(evidence, calls, findings)
        elif calls and group == "0" and evidence.world_size > 1:
            (rank, events), *_ = calls.items()
            text = f"only rank {rank} calls {events[0].op}; the other ranks never do"
            findings.add("FAIL", "collective.one-rank", events[0].line, text, "call it on all ranks")
    if evidence.run.status == "hangs":
        _explain_hang(evidence, findings)


def _describe_call(rank: int, event: CollectiveCall) -> str:
    shape = f" {event.shapes[0]}" if event.shapes else ""
    phase = "" if event.phase == "script" else f" ({event.phase.partition(' at ')[0]})"
    return f"rank {rank} calls {event.op}{shape}{phase} at {short_location(event.line)}"


def _match(first: CollectiveCall, second: CollectiveCall) -> bool:
    are_equal = first.shapes == second.shapes and first.reduction == second.reduction
    return first.op == second.op and (are_equal or first.op in _UNEVEN_SHAPES)


def _compare(evidence: Evidence, calls: dict[int, list[CollectiveCall]], findings: Findings) -> None:
    first_rank, *other_ranks = calls
    for number in range(min(map(len, calls.values()))):
        for rank in other_ranks:
            call, other_call = calls[first_rank][number], calls[rank][number]
            if not _match(call, other_call):
                findings.add(
                    "FAIL",
                    "collective.order",
                    call.line,
                    f"collective {number} of a group differs: {_describe_call(first_rank, call)}; "
                    f"{_describe_call(rank, other_call)}",
                    "call the same collectives, with the same shapes and in the same order, on all ranks of a group",
                    (other_call.line,),
                )
                return
        _compare_strides([events[number] for events in calls.values()], findings)
    num_common = min(map(len, calls.values()))
    waiting_ranks = {rank: events for rank, events in calls.items() if len(events) > num_common}
    if waiting_ranks and evidence.run.status == "hangs":
        rank, events = next(iter(waiting_ranks.items()))
        missing_ranks = [other for other in calls if other not in waiting_ranks]
        findings.add(
            "FAIL",
            "collective.missing",
            events[num_common].line,
            f"{_describe_call(rank, events[num_common])}, but rank {', '.join(map(str, missing_ranks))} never does: "
            + "; ".join(f"rank {other} was at {short_location(evidence.stopped_at(other))}" for other in missing_ranks),
            "call it equally often on all ranks: loaders of different lengths need Join, drop_last, or a common length",
            tuple(calls[other][-1].line for other in missing_ranks),
        )


def _compare_strides(events: Sequence[CollectiveCall], findings: Findings) -> None:
    """Find a collective whose tensors have the same shape but different strides on the ranks."""
    strides = list(dict.fromkeys(text for event in events for text in event.strides))
    if len(strides) > 1 and len({shape for event in events for shape in event.shapes}) == 1:
        in_backward = events[0].phase.startswith("backward")
        cause = " (a gradient that is a view, in the backward of a gather)" if in_backward else ""
        findings.add(
            "FAIL",
            "collective.strides",
            events[0].line,
            f"{events[0].op} of {events[0].shapes[0]}{cause} between tensors with strides {' and '.join(strides)}: "
            "elements are sent in memory order, so they arrive at wrong positions",
            "call .contiguous() on the tensor before the collective, or on the result that is computed from a gather",
            tuple(event.line for event in events[1:]),
        )


def _explain_hang(evidence: Evidence, findings: Findings) -> None:
    if findings.has("collective."):
        return
    lines = {rank: evidence.stopped_at(rank) for rank in evidence.ranks}
    text = "; ".join(f"rank {rank} was at {short_location(line)}" for rank, line in lines.items())
    first_line = next((line for line in lines.values() if line), "")
    fix = "find out why one rank does not reach the line where the other ranks wait"
    findings.add("FAIL", "run.hangs", first_line, f"the run hangs: {text}", fix)
