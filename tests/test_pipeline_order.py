"""Pipeline schedules cannot deadlock with NCCL, where operations of a group run in the order of their calls.

Each schedule is checked as a dependency graph, without running it. A message is one node, which both ranks must reach.
Each rank computes in order, and a receive blocks later operations. A deadlock is a cycle in this graph.
"""

from __future__ import annotations

import graphlib
from collections.abc import Hashable, Iterator

import pytest

from everyrank.parallel.pipeline.schedule import make_schedule

Case = tuple[str, int, int, int]


def cases(*names: str) -> Iterator[Case]:
    """Yield combinations of (schedule, ranks, micro-batches, chunks)."""
    for name in names:
        for ranks in (2, 3, 4, 6):
            for micro_batches in (1, 2, 3, 4, 7, 8, 12):
                for chunks in (2, 3) if name == "interleaved" else (1,):
                    yield name, ranks, micro_batches, chunks


def deadlocks(case: Case, separate: bool = True, ahead: bool = False) -> bool:
    """Return whether the schedule deadlocks.

    separate   each direction has its own process group
    ahead      a receive is posted before the preceding computation
    """
    name, ranks, micro_batches, chunks = case
    last = ranks * chunks - 1
    graph: dict[Hashable, set[Hashable]] = {}
    for rank, row in enumerate(make_schedule(name, ranks, micro_batches, chunks)):
        newest: dict[Hashable, Hashable] = {}  # the last operation of each group
        computed: Hashable = None

        def call(
            node: Hashable, group: Hashable, *after: Hashable, newest: dict[Hashable, Hashable] = newest
        ) -> Hashable:
            graph.setdefault(node, set()).update(other for other in (newest.get(group), *after) if other is not None)
            newest[group] = node
            return node

        def message(kind: str, source: int, target: int, index: int) -> tuple[Hashable, Hashable]:
            wraps = source // ranks != target // ranks
            return ("message", kind, source, target, index), (kind, wraps) if separate else ""

        def receive(position: int, computed: Hashable, row: list[tuple[str, int, int]] = row) -> Hashable:
            kind, stage, index = row[position] if position < len(row) else ("W", 0, 0)
            if kind == "W" or stage == (0 if kind == "F" else last):
                return None
            return call(*message(kind, stage - 1 if kind == "F" else stage + 1, stage, index), computed)

        posted = receive(0, None)
        for position, (kind, stage, index) in enumerate(row):
            received = posted if ahead or not position else receive(position, computed)
            posted = receive(position + 1, computed) if ahead else None
            computed = call(("compute", kind, stage, index), ("rank", rank), received)
            if kind != "W" and stage != (last if kind == "F" else 0):
                call(*message(kind, stage, stage + 1 if kind == "F" else stage - 1, index), computed)
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError:
        return True
    return False


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_no_schedule_deadlocks(name: str) -> None:
    """As in `PipelineRun`, receives are posted just in time, and each direction has a process group."""
    assert not [case for case in cases(name) if deadlocks(case)]


def test_single_group_for_all_directions_deadlocks() -> None:
    """This is why each direction has its own process group."""
    assert [case for case in cases("1f1b") if deadlocks(case, separate=False)]


def test_receives_posted_early_deadlock() -> None:
    """This is why receives are posted just in time. With earlier receives, many interleaved schedules deadlock."""
    results = [deadlocks(case, ahead=True) for case in cases("interleaved")]
    assert sum(results) > len(results) // 4
