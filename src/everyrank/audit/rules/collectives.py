"""Whether all ranks call the same collectives in the same order; and where a run that hangs, or failed, stands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from everyrank.audit.events import Collective, ProcessStart
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings, short_place
from everyrank.audit.watch.place import is_own_file

__all__ = ["check_collectives", "stands"]

_POINT_TO_POINT = ("send", "recv")
# of which the root alone has the list of tensors; and those in which each rank sends as many rows as it has
_UNEVEN = ("gather_", "scatter_", "alltoall_", "alltoall_base_", "all_to_all_single")
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


def check_collectives(evidence: Evidence, findings: Findings) -> None:
    """By group, in the order in which each rank calls them."""
    for group in sorted(evidence.groups):
        calls = {
            rank: [
                event
                for event in evidence.of(rank, Collective)
                if event.group == group and not event.op.startswith(_POINT_TO_POINT)
            ]
            for rank in evidence.ranks
        }
        calls = {rank: events for rank, events in calls.items() if events}
        if len(calls) > 1:
            _compare(evidence, calls, findings)
        elif calls and group == "0" and evidence.world_size > 1:
            (rank, events), *_ = calls.items()
            text = f"only rank {rank} calls {events[0].op}: the others never come"
            findings.add("FAIL", "collective.one-rank", events[0].line, text, "call it on all ranks")
    if evidence.run.status == "hangs":
        _explain_hang(evidence, findings)


def _said(rank: int, event: Collective) -> str:
    shape = f" {event.shapes[0]}" if event.shapes else ""
    phase = "" if event.phase == "script" else f" ({event.phase.partition(' at ')[0]})"
    return f"rank {rank} calls {event.op}{shape}{phase} at {short_place(event.line)}"


def _are_same(one: Collective, other: Collective) -> bool:
    are_alike = one.shapes == other.shapes and one.reduction == other.reduction
    return one.op == other.op and (are_alike or one.op in _UNEVEN)


def _compare(evidence: Evidence, calls: dict[int, list[Collective]], findings: Findings) -> None:
    first, *others = calls
    for place in range(min(map(len, calls.values()))):
        for rank in others:
            one, other = calls[first][place], calls[rank][place]
            if not _are_same(one, other):
                findings.add(
                    "FAIL",
                    "collective.order",
                    one.line,
                    f"collective {place} of a group differs: {_said(first, one)}; {_said(rank, other)}",
                    "all ranks of a group call the same collectives, with the same shapes, in the same order",
                    (other.line,),
                )
                return
        _compare_layouts([events[place] for events in calls.values()], findings)
    shortest = min(map(len, calls.values()))
    longer = {rank: events for rank, events in calls.items() if len(events) > shortest}
    if longer and evidence.run.status == "hangs":
        rank, events = next(iter(longer.items()))
        missing = [other for other in calls if other not in longer]
        findings.add(
            "FAIL",
            "collective.missing",
            events[shortest].line,
            f"{_said(rank, events[shortest])}, and rank {', '.join(map(str, missing))} never comes: "
            + "; ".join(f"rank {other} stands at {stands(evidence, other) or '?'}" for other in missing),
            "call it on all ranks, equally often: uneven loaders need Join, drop_last, or a common length",
            tuple(calls[other][-1].line for other in missing),
        )


def _compare_layouts(events: Sequence[Collective], findings: Findings) -> None:
    """One collective on each rank: tensors of one shape whose elements lie in memory in different orders."""
    layouts = list(dict.fromkeys(layout for event in events for layout in event.strides))
    if len(layouts) > 1 and len({shape for event in events for shape in event.shapes}) == 1:
        in_backward = events[0].phase.startswith("backward")
        what = " (a gradient that is a view, in the backward of a gather)" if in_backward else ""
        findings.add(
            "FAIL",
            "collective.strides",
            events[0].line,
            f"{events[0].op} of {events[0].shapes[0]}{what} between tensors of strides {' and '.join(layouts)}: "
            "elements are sent in the order of memory, and arrive in other places",
            "send contiguous tensors: .contiguous() before the collective; after a gather, of what is computed of it",
            tuple(event.line for event in events[1:]),
        )


def _explain_hang(evidence: Evidence, findings: Findings) -> None:
    if findings.has("collective."):
        return
    standing = {rank: stands(evidence, rank) for rank in evidence.ranks}
    text = "; ".join(
        f"rank {rank} stands at {short_place(place) if place else '?'}" for rank, place in standing.items()
    )
    line = next((place.partition(" ")[0] for place in standing.values() if place), "")
    findings.add("FAIL", "run.hangs", line, f"nothing moved any more: {text}", "which rank does not come, and why?")


def stands(evidence: Evidence, rank: int) -> str:
    """The person's line at which a rank stood when the run was ended; "" where it did not say."""
    for event in evidence.of(rank, ProcessStart):
        path = Path(evidence.run.folder / f"stack{event.pid}")
        if path.exists():
            for filename, line, _ in _FRAME.findall(path.read_text(errors="replace")):
                if is_own_file(filename):
                    return f"{filename}:{line}"
    return ""
