"""Compare the peak memory that `everyrank plan` traces on fake tensors with the measured peak on 2 CPU ranks.

    python benchmarks/plan_memory.py                    # writes benchmarks/records/plan-memory-cpu.json

The measured peak of an update is the largest sum of live allocations that the profiler sees on a rank. The median over
the updates is compared, without the first two. Both sides use the same decoder with inputs of zeros.

The profiler of torch does not see a tensor that another thread frees. So operations of the shm backend complete in the
thread that starts them or waits for them, not in the thread of the backend.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import gc
import json
import re
import statistics
import sys
from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from everyrank.backends.engine import Engine
from everyrank.builtin import DecoderShape
from everyrank.launch import Launch, run_ranks
from everyrank.layout import parse_layout
from everyrank.measure.profiling import events_of, profiler
from everyrank.measure.provenance import machine
from everyrank.plan.calibrate import decoder_workload
from everyrank.plan.pretend import first_sample, micro_batches_of, trace_step
from everyrank.strategies import prepare
from everyrank.workload import Workload
from everyrank.world import open_world

LAYOUTS = (
    *("ddp", "ddp:precision=bf16", "ddp:accumulate=2", "zero1", "local_sgd"),
    *("fsdp", "fsdp:recompute", "fsdp:precision=bf16", "fsdp:accumulate=2", "fsdp:reshard_after_forward=false"),
    *("fsdp:meta=true", "pipeline", "pipeline:schedule=gpipe", "pipeline:schedule=zero-bubble", "context", "tensor"),
    *("context:method=ulysses", "tensor:sequence=true", "tensor:precision=bf16", "fsdp:replicate=2"),
)
GRACE_SECONDS = 60.0  # an operation waits this long for the other rank in the thread that starts it
LENGTH, OUT = 128, Path(__file__).parent / "records" / "plan-memory-cpu.json"


def small_decoder() -> Workload:
    """Return a workload that trains a decoder of 4 blocks and 4 million parameters."""
    shape = DecoderShape(num_blocks=4, num_heads=4, width=256, hidden=704, vocabulary=2048)
    return decoder_workload(shape, 64, LENGTH, global_batch=8, sequence_dim=1, steps=3)


def measure(info: Any, layout_text: str, backend: str, num_updates: int) -> tuple[list[int], dict[str, Any]]:
    """Return the peak bytes of each update after the second, and the machine. Runs on each rank."""
    launch = Launch(processes=info.size, backend=backend, timeout_seconds=600.0)
    with without_backend_thread(), open_world(info, launch) as world:
        return _peaks(world, layout_text, num_updates), machine(world)


@contextlib.contextmanager
def without_backend_thread() -> Generator[None]:
    """Run collectives of everyrank's backends in the thread that starts them, and messages in the thread that waits."""
    finish_or_leave = Engine.finish_or_leave

    def finish_or_leave_with_grace(
        self: Engine, operation: Any, is_async: bool, grace_seconds: float = GRACE_SECONDS
    ) -> Any:
        return finish_or_leave(self, operation, is_async, grace_seconds)

    with (
        mock.patch.object(Engine, "finish_or_leave", finish_or_leave_with_grace),
        mock.patch.object(Engine, "_leave_to_thread"),
    ):
        yield


def _peaks(world: Any, layout_text: str, num_updates: int) -> list[int]:
    layout, workload = parse_layout(layout_text), small_decoder()
    sample = first_sample(workload)
    gc.collect()
    with profiler(torch.device("cpu"), memory=True) as profile:
        prepared = prepare(workload, layout, world)
        for update in range(2 + num_updates):  # DDP rebuilds its buckets in the second update
            gc.collect()
            with torch.profiler.record_function(f"update {update}"):
                prepared.step(micro_batches_of(prepared, sample, torch.zeros))
    events = events_of(profile)
    starts = sorted(event["ts"] for event in events if re.fullmatch(r"update \d+", event["name"]))[2:]
    memory_events = [e for e in events if e["name"] == "[memory]" and e["args"]["Device Type"] == 0]
    live_bytes: dict[int, int] = {}  # by address
    total, peaks = 0, [0] * num_updates
    for event in sorted(memory_events, key=lambda event: event["ts"]):
        address, change = int(event["args"]["Addr"]), int(event["args"]["Bytes"])
        if change > 0:
            live_bytes[address] = change
            total += change
        else:
            total -= live_bytes.pop(address, 0)
        if (update := bisect.bisect_right(starts, event["ts"]) - 1) >= 0:
            peaks[update] = max(peaks[update], total)
    return peaks


def main() -> int:
    """Measure and trace all layouts, write the table, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", nargs="+", default=list(LAYOUTS), help="rows of other layouts in --out are kept")
    parser.add_argument("--backend", help="default: everyrank chooses")
    parser.add_argument(
        "--updates", type=int, default=7, help="measured updates, after two others; default: %(default)s"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    existing = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    rows: list[dict[str, Any]] = [row for row in existing if row["layout"] not in args.layout]
    metadata: dict[str, Any] = {}
    workload = small_decoder()
    sample = first_sample(workload)
    for layout_text in args.layout:
        # each layout starts new processes, because tensors that an earlier layout left alive would be counted
        launch = Launch(processes=2, backend=args.backend, timeout_seconds=600.0)
        measured = run_ranks(launch, measure, layout_text, args.backend, args.updates)
        metadata = {
            "command": "python benchmarks/plan_memory.py",
            "provenance": measured[0][1] | {"date": f"{datetime.now(UTC):%Y-%m-%d}"},
        }
        for rank in (0, 1):
            traced = trace_step(workload, parse_layout(layout_text), 2, rank, sample)
            peaks = measured[rank][0]
            median = statistics.median_low(peaks)
            rows.append(
                {
                    "layout": layout_text,
                    "backend": args.backend,
                    "rank": rank,
                    "measured_bytes": median,
                    "traced_bytes": traced.peak_bytes,
                }
                | {"least_bytes": min(peaks), "most_bytes": max(peaks)}
                | {"error": traced.peak_bytes / median - 1, "categories": dict(traced.categories)}
            )
            low, middle, high = (size / 2**20 for size in (min(peaks), median, max(peaks)))
            print(
                f"{layout_text} rank {rank}: {middle:.2f} MiB measured ({low:.2f} to {high:.2f}), "
                f"traced {100 * rows[-1]['error']:+.2f}%",
                flush=True,
            )
        args.out.write_text(json.dumps(metadata | {"rows": rows}, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
