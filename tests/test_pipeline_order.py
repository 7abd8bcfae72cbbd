"""Pipelines under nccl's rules, as a graph: operations of a group run in the order in which its rank has called them.

A message is one node, which both ranks reach together; a rank computes in order; a receive holds up what comes after
it. A schedule that waits for itself is a cycle. Nothing runs.
"""

from __future__ import annotations

import graphlib
from collections.abc import Hashable, Iterator

import pytest

from everyrank.parallel.pipeline.schedule import make_schedule

Case = tuple[str, int, int, int]


def cases(*names: str) -> Iterator[Case]:
    """(schedule, ranks, micro-batches, chunks)."""
    for name in names:
        for ranks in (2, 3, 4, 6):
            for micro_batches in (1, 2, 3, 4, 7, 8, 12):
                for chunks in (2, 3) if name == "interleaved" else (1,):
                    yield name, ranks, micro_batches, chunks


def waits_for_itself(case: Case, separate: bool = True, ahead: bool = False) -> bool:
    """`separate`: each way has a group of its own; `ahead`: a receive is posted before the computation before it."""
    name, ranks, micro_batches, chunks = case
    last = ranks * chunks - 1
    graph: dict[Hashable, set[Hashable]] = {}
    for rank, row in enumerate(make_schedule(name, ranks, micro_batches, chunks)):
        newest: dict[Hashable, Hashable] = {}  # of each group
        computed: Hashable = None

        def call(
            node: Hashable, group: Hashable, *after: Hashable, newest: dict[Hashable, Hashable] = newest
        ) -> Hashable:
            graph.setdefault(node, set()).update(one for one in (newest.get(group), *after) if one is not None)
            newest[group] = node
            return node

        def message(kind: str, source: int, target: int, index: int) -> tuple[Hashable, Hashable]:
            wraps = source // ranks != target // ranks
            return ("message", kind, source, target, index), (kind, wraps) if separate else ""

        def receive(place: int, computed: Hashable, row: list[tuple[str, int, int]] = row) -> Hashable:
            kind, stage, index = row[place] if place < len(row) else ("W", 0, 0)
            if kind == "W" or stage == (0 if kind == "F" else last):
                return None
            return call(*message(kind, stage - 1 if kind == "F" else stage + 1, stage, index), computed)

        posted = receive(0, None)
        for place, (kind, stage, index) in enumerate(row):
            received = posted if ahead or not place else receive(place, computed)
            posted = receive(place + 1, computed) if ahead else None
            computed = call(("compute", kind, stage, index), ("rank", rank), received)
            if kind != "W" and stage != (last if kind == "F" else 0):
                call(*message(kind, stage, stage + 1 if kind == "F" else stage - 1, index), computed)
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError:
        return True
    return False


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_no_schedule_waits_for_itself(name: str) -> None:
    """As `PipelineRun` calls: receives just in time, a group for each way."""
    assert not [case for case in cases(name) if waits_for_itself(case)]


def test_one_group_for_all_ways_would() -> None:
    """Why each way has a group of its own."""
    assert [case for case in cases("1f1b") if waits_for_itself(case, separate=False)]


def test_receives_posted_ahead_would() -> None:
    """Why receives are posted just in time: one ahead, many interleaved schedules never end."""
    found = [waits_for_itself(case, ahead=True) for case in cases("interleaved")]
    assert sum(found) > len(found) // 4
