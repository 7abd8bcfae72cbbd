"""Compare the layouts that `everyrank plan` advises for Llama 3 on H100 with published choices, and time its answer.

    python benchmarks/plan_decoders.py                  # writes benchmarks/records/plan-decoders-cpu.json
    python benchmarks/plan_decoders.py --trace          # also traces FSDP for 8B on 64 ranks

The published choices come from torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, and from Llama Team 2024, "The
Llama 3 herd of models", table 4. Where a layout of everyrank is close to the published one, it is predicted as well.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from everyrank.builtin import DecoderShape
from everyrank.layout import parse_layout
from everyrank.plan.answer import PlanRequest, answer_plan
from everyrank.plan.calibrate import decoder_workload
from everyrank.plan.calibration import shipped_calibration
from everyrank.plan.decoder import parse_decoder
from everyrank.plan.hardware import parse_cluster
from everyrank.plan.pretend import first_sample
from everyrank.plan.traced import trace_layout
from everyrank.record import write_text

OUT = Path(__file__).parent / "records" / "plan-decoders-cpu.json"


@dataclass(frozen=True)
class Case:
    """A decoder on a cluster.

    batch           samples of an update; None: `plan` chooses it
    published       the published choice; "" if there is none
    nearest_layout  the layout of everyrank that is closest to the published choice; "" if there is none
    """

    decoder: str
    cluster: str
    batch: int | None = None
    published: str = ""
    nearest_layout: str = ""


_TORCHTITAN, _FSDP = "h100_96gb_hbm2e_500w", "fsdp:precision=bf16,meta=true"
CASES = (
    Case("8b", f"8x{_TORCHTITAN}", 16, "torchtitan: FSDP 8, selective recomputation", _FSDP),
    Case("8b", f"128x{_TORCHTITAN}", 256, "torchtitan: FSDP 128, selective recomputation", _FSDP),
    Case("70b", f"256x{_TORCHTITAN}", 512, "torchtitan: FSDP 32, TP 8, full recomputation",
         "fsdp:tensor=8,precision=bf16,recompute,sequence=true,meta=true"),
    Case("405b", f"512x{_TORCHTITAN}", 256, "torchtitan: FSDP 8, TP 8, PP 8, full recomputation",
         "pipeline:pipeline=8,shard=8,tensor=8,microbatches=32,precision=bf16,recompute,meta=true"),
    Case("405b", "16384xh100", 2048, "Llama 3: TP 8, PP 16, DP 128",
         "pipeline:pipeline=16,shard=128,tensor=8,microbatches=16,precision=bf16,meta=true"),
    *(Case(decoder, f"{gpus}xh100") for decoder in ("8b", "70b", "405b") for gpus in (8, 64, 1024, 16384)),
)  # fmt: skip


def advise(case: Case) -> dict[str, Any]:
    """Return the row of a case: the shortlist, the seconds that the answer took, and the published choice."""
    sizes, cluster = parse_decoder(case.decoder), parse_cluster(case.cluster)
    calibration = shipped_calibration()
    request = PlanRequest(sizes, case.decoder, "w.py", cluster, case.batch)
    start, cpu_start = time.perf_counter(), time.process_time()
    answer = answer_plan(request, calibration)
    row: dict[str, Any] = {
        "decoder": case.decoder,
        "cluster": case.cluster,
        "batch": answer["batch"]["samples"],
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - cpu_start,
        "looked_at": answer["looked_at"],
        "fitting": answer["fitting"],
        "is_ranked": answer["is_ranked"],
        "outside": answer["outside"],
        "factor": answer["calibration"]["factor"],
        "favourites": [_shortlist_row(choice) for choice in answer["shortlist"]],
        "published": case.published,
    }
    if case.nearest_layout:
        nearest_request = PlanRequest(sizes, case.decoder, "w.py", cluster, case.batch, (case.nearest_layout,))
        entry = answer_plan(nearest_request, calibration)["layouts"][0]
        row["same"] = {
            name: entry[name] for name in ("layout", "verdict", "step_seconds", "allocated_bytes", "most_bytes")
        }
    return row


def _shortlist_row(choice: dict[str, Any]) -> dict[str, Any]:
    names = ("layout", "step_seconds", "share_of_peak", "allocated_bytes", "most_bytes", "bound")
    return {name: choice[name] for name in names}


def trace_8b() -> dict[str, Any]:
    """Trace 8B on 64 ranks, and return the seconds that this took, the memory and the collectives."""
    sizes = parse_decoder("8b")
    shape = DecoderShape(
        num_blocks=sizes.layers,
        num_heads=sizes.heads,
        width=sizes.hidden,
        hidden=sizes.ffn,
        vocabulary=sizes.vocab,
    )
    workload = decoder_workload(shape, 128, sizes.seq, name="8b", global_batch=128, steps=1)
    layout = parse_layout("fsdp:precision=bf16,recompute,meta=true")
    start, cpu_start = time.perf_counter(), time.process_time()
    traced = trace_layout(workload, layout, 64, first_sample(workload))
    return {
        "layout": str(layout),
        "ranks": 64,
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - cpu_start,
        "allocated_bytes": traced.allocated,
        "note": traced.note,
        "collectives": dict(traced.collectives),
    }


def main() -> int:
    """Ask `plan` about all cases, print and write the answers, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true", help="also trace FSDP for 8B on 64 ranks")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python benchmarks/plan_decoders.py --trace",
        "provenance": {
            "torch": importlib.metadata.version("torch"),
            "cores": os.cpu_count(),
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
        },
        "rows": [],
    }
    for case in CASES:
        row = advise(case)
        result["rows"].append(row)
        shortlist = ", ".join(choice["layout"] for choice in row["favourites"]) or "nothing fits"
        print(f"{case.decoder} {case.cluster} {row['seconds']:.3f} s: {shortlist}; {row.get('same', '')}", flush=True)
    if args.trace:
        result["traced"] = trace_8b()
        print(result["traced"])
    write_text(args.out, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
