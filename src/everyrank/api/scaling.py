"""How each layout scales: `bench` on several numbers of ranks. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from everyrank.api.calls import bench
from everyrank.errors import EveryrankError, UsageError
from everyrank.launch import Launch
from everyrank.layout import Layout
from everyrank.options import BenchOptions
from everyrank.progress import row_known
from everyrank.record import Interval, Parity, Record, Scaling
from everyrank.workload import Source, Workload

__all__ = ["bench_scaling"]


def bench_scaling(
    workload: Workload | Source,
    layouts: Sequence[Layout],
    launch: Launch,
    processes: Sequence[int],
    *,
    options: BenchOptions | None = None,
    kept: list[Record] | None = None,
) -> list[Record]:
    """`bench` on each number of ranks, which begin with 1; two Records for each layout on more than one.

    Strong scaling keeps the global batch; weak scaling keeps the batch of each rank, so that the global batch grows.
    The efficiency in `Record.scaling` is the throughput divided by the ranks and by that of the same layout on one
    rank. Each number of ranks is a launch of its own: their trials are not interleaved. `kept` as for `bench`.
    """
    options = options or BenchOptions()
    sizes = _checked_sizes(processes)
    runs = [(1, "strong"), *((size, kind) for size in sizes[1:] for kind in ("strong", "weak"))]
    distributed = [layout for layout in layouts if layout.axis is not None]
    records: list[Record] = []
    base: dict[str, Record] = {}
    for size, kind in runs:
        shown = layouts if size == 1 else distributed
        if not shown:
            continue
        if options.show and len(sizes) > 1:
            row_known("1 rank:" if size == 1 else f"{size} ranks, {kind} scaling:")
        here = dataclasses.replace(launch, processes=size)
        scaled = dataclasses.replace(options, batch_factor=size if kind == "weak" else 1)
        partial: list[Record] = []
        try:
            made = bench(workload, shown, here, options=scaled, kept=partial)
        except BaseException as error:
            if not records or not isinstance(error, EveryrankError):
                if kept is not None:
                    kept[:] = records + [_with_efficiency(row, base.get(row.layout, row), kind) for row in partial]
                raise
            # what smaller sizes came to is not thrown away
            made = [_not_verified(records[0], layout, size, str(error)) for layout in shown]
        base = base or {record.layout: record for record in made}
        records += [_with_efficiency(record, base[record.layout], kind) for record in made]
    return records


def _checked_sizes(processes: Sequence[int]) -> list[int]:
    """The numbers of ranks, each once. Raises `UsageError` where they do not grow from 1."""
    sizes = list(dict.fromkeys(processes))
    if sizes[0] != 1 or sorted(sizes) != sizes:
        given = " ".join(map(str, processes))
        raise UsageError(f"--processes {given}: scaling is measured against one rank; give 1 first and then more")
    return sizes


def _not_verified(like: Record, layout: Layout, size: int, reason: str) -> Record:
    parity = Parity("not_verified", reason=reason)
    where = (like.launcher, like.backend, like.device, size)
    return Record(like.workload, str(layout), *where, parity=parity, provenance=like.provenance)


def _with_efficiency(record: Record, base: Record, kind: str) -> Record:
    """The Record with its efficiency; the interval is the widest that both intervals allow."""
    own, one = record.throughput_samples_per_second, base.throughput_samples_per_second
    if record is base or own is None or one is None:
        return record
    size = record.world_size
    efficiency = Interval(
        own.median / one.median / size,
        own.low / one.high / size,
        own.high / one.low / size,
        min(own.trials, one.trials),
    )
    return dataclasses.replace(record, scaling=Scaling(kind, efficiency))
