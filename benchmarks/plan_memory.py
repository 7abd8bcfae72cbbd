"""Peak memory of an update on 2 CPU ranks, measured and as `everyrank plan` traces it on fake tensors.

    python benchmarks/plan_memory.py                    # writes benchmarks/records/plan-memory-cpu.json

The measured peak is the sum of all allocations that the profiler sees on a rank. Each update after the second has its
own peak, and the median is compared. Both are of the same decoder, with inputs of zeros.

torch's profiler does not see a tensor that another thread frees. So operations of the shm backend end in the thread
that starts them or waits for them, and not in the backend's own.
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
PATIENCE = 60.0  # seconds in which another rank comes
LENGTH, OUT = 128, Path(__file__).parent / "records" / "plan-memory-cpu.json"


def workload() -> Workload:
    """A decoder of 4 blocks and 4 million parameters."""
    shape = DecoderShape(num_blocks=4, num_heads=4, width=256, hidden=704, vocabulary=2048)
    return decoder_workload(shape, 64, LENGTH, global_batch=8, sequence_dim=1, steps=3)


def on_rank(info: Any, text: str, backend: str, num_updates: int) -> tuple[list[int], dict[str, Any]]:
    """Return the peak bytes of each update after the second on this rank, and the machine."""
    launch = Launch(processes=info.size, backend=backend, timeout_seconds=600.0)
    with without_a_thread(), open_world(info, launch) as world:
        return _peaks(world, text, num_updates), machine(world)


@contextlib.contextmanager
def without_a_thread() -> Generator[None]:
    """Run the operations of everyrank's backends in the thread that starts them, and messages in one that waits."""
    progress = Engine.progress

    def patient(self: Engine, operation: Any, is_async: bool, grace_seconds: float = PATIENCE) -> Any:
        return progress(self, operation, is_async, grace_seconds)

    with mock.patch.object(Engine, "progress", patient), mock.patch.object(Engine, "_leave_to_thread"):
        yield


def _peaks(world: Any, text: str, num_updates: int) -> list[int]:
    layout, trained = parse_layout(text), workload()
    sample = first_sample(trained)
    gc.collect()
    with profiler(torch.device("cpu"), memory=True) as finished:
        prepared = prepare(trained, layout, world)
        for update in range(2 + num_updates):  # DDP makes its buckets anew in the second update
            gc.collect()
            with torch.profiler.record_function(f"update {update}"):
                prepared.step(micro_batches_of(prepared, sample, torch.zeros))
    events = events_of(finished)
    starts = sorted(event["ts"] for event in events if re.fullmatch(r"update \d+", event["name"]))[2:]
    changes = [e for e in events if e["name"] == "[memory]" and e["args"]["Device Type"] == 0]
    alive: dict[int, int] = {}
    total, peaks = 0, [0] * num_updates
    for event in sorted(changes, key=lambda event: event["ts"]):
        address, change = int(event["args"]["Addr"]), int(event["args"]["Bytes"])
        if change > 0:
            alive[address] = change
            total += change
        else:
            total -= alive.pop(address, 0)
        if (update := bisect.bisect_right(starts, event["ts"]) - 1) >= 0:
            peaks[update] = max(peaks[update], total)
    return peaks


def main() -> int:
    """Measure, trace and write the table; 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", nargs="+", default=list(LAYOUTS), help="rows of other layouts in --out are kept")
    parser.add_argument("--backend", help="default: as everyrank chooses")
    parser.add_argument("--updates", type=int, default=7, help="that are measured, after two; default: %(default)s")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    kept = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    rows: list[dict[str, Any]] = [row for row in kept if row["layout"] not in args.layout]
    about: dict[str, Any] = {}
    trained = workload()
    sample = first_sample(trained)
    for text in args.layout:
        # processes of its own: what an earlier layout has left alive would be counted
        launch = Launch(processes=2, backend=args.backend, timeout_seconds=600.0)
        measured = run_ranks(launch, on_rank, text, args.backend, args.updates)
        about = {
            "command": "python benchmarks/plan_memory.py",
            "provenance": measured[0][1] | {"date": f"{datetime.now(UTC):%Y-%m-%d}"},
        }
        for rank in (0, 1):
            traced = trace_step(trained, parse_layout(text), 2, rank, sample)
            peaks = measured[rank][0]
            real = statistics.median_low(peaks)
            rows.append(
                {
                    "layout": text,
                    "backend": args.backend,
                    "rank": rank,
                    "measured_bytes": real,
                    "traced_bytes": traced.peak_bytes,
                }
                | {"least_bytes": min(peaks), "most_bytes": max(peaks)}
                | {"error": traced.peak_bytes / real - 1, "categories": dict(traced.categories)}
            )
            least, middle, most = (size / 2**20 for size in (min(peaks), real, max(peaks)))
            print(
                f"{text} rank {rank}: {middle:.2f} MiB measured ({least:.2f} to {most:.2f}), "
                f"{100 * rows[-1]['error']:+.2f}%",
                flush=True,
            )
        args.out.write_text(json.dumps(about | {"rows": rows}, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
