"""One step of every rank under torch.profiler, merged into one trace for Perfetto (ui.perfetto.dev) or Chrome.

Every rank is a process in the trace, named by its rank; the phases of the step are shown above its operators. Ranks of
one host share a clock; between hosts the trace is off by the difference of their clocks.
"""

from __future__ import annotations

import gzip
import json
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from everyrank.measure.profiling import profiler, trace_of
from everyrank.measure.split import marked_phases
from everyrank.parallel.trainable import Trainable
from everyrank.world import World
from everyrank.world.collectives import all_gather

__all__ = ["merge", "with_one_profiled"]

T = TypeVar("T")


def with_one_profiled(items: Iterator[T], index: int, trainable: Trainable, world: World, path: Path) -> Iterator[T]:
    """Yield the items; profile item `index` on every rank, and write the merged trace to `path` on rank 0.

    A collective at that item.
    """
    for number in range(index):
        del number
        yield next(items)
    with profiler(world.device) as finished, marked_phases(trainable, world.device):
        item = next(items)
    local_trace = {"host": platform.node(), "trace": trace_of(finished)}
    packed = gzip.compress(json.dumps(local_trace).encode(), compresslevel=1)
    rows = all_gather(torch.frombuffer(bytearray(packed), dtype=torch.uint8), world)
    if world.rank == 0:
        ranks = [json.loads(gzip.decompress(bytes(row.numpy()))) for row in rows]
        _write(merge([rank["trace"] for rank in ranks], [rank["host"] for rank in ranks]), path)
    yield item
    yield from items


def merge(traces: Sequence[dict[str, Any]], hosts: Sequence[str]) -> dict[str, Any]:
    """Merge the traces of all ranks, with separate process and flow numbers for each rank."""
    bases = [int(trace.get("baseTimeNanoseconds", 0)) for trace in traces]
    merged: list[dict[str, Any]] = []
    for rank, (trace, host, base) in enumerate(zip(traces, hosts, bases, strict=True)):
        shift = (base - min(bases)) / 1e3
        for event in trace["traceEvents"]:
            event = dict(event)
            if "ts" in event:
                event["ts"] = float(event["ts"]) + shift
            if isinstance(event.get("id"), int):  # the id of a flow has to be a number
                event["id"] += rank * 2**32
            process = event.get("pid")
            if isinstance(process, int):
                event["pid"] = rank * 10_000_000 + process
            elif process is not None:
                event["pid"] = f"rank {rank}: {process}"
            if event.get("name") == "process_name" and event.get("ph") == "M":
                label = event["args"]["name"]
                event["args"] = {"name": f"rank {rank} on {host} ({label})"}
            if event.get("name") == "process_sort_index" and event.get("ph") == "M":
                event["args"] = {"sort_index": rank}
            merged.append(event)
    return {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": merged}


def _write(trace: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for event in trace["traceEvents"]:
        arguments = event.get("args", {})
        event["args"] = {name: value for name, value in arguments.items() if value == value}  # NaN is not JSON
    text = json.dumps(trace)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
