"""The answer of `everyrank plan` as one JSON object: what fits, the smallest changes, the shortlist."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from everyrank.errors import UsageError
from everyrank.layout import Layout, parse_layout
from everyrank.plan.calibration import Calibration
from everyrank.plan.candidates import (
    Estimate,
    configure_layout,
    default_batch,
    estimate,
    find_best,
    smallest_change,
    usual_layouts,
)
from everyrank.plan.decoder import DecoderSizes
from everyrank.plan.hardware import Cluster
from everyrank.plan.memory import CATEGORIES
from everyrank.plan.whole_run import predict_run

__all__ = ["PlanRequest", "answer_plan"]


@dataclass(frozen=True)
class PlanRequest:
    """What is asked.

    sizes     the decoder; name: what it is called
    workload  the words of the commands, as typed for a shell
    batch     samples of an update; None: `default_batch`
    layouts   those asked for; empty: all
    tokens    of the whole run; price: for an hour of a GPU; mtbf_hours: between failures of the job
    """

    sizes: DecoderSizes
    name: str
    workload: str
    cluster: Cluster
    batch: int | None = None
    layouts: Sequence[str] = ()
    tokens: float | None = None
    price: float | None = None
    mtbf_hours: float | None = None


def answer_plan(request: PlanRequest, calibration: Calibration) -> dict[str, Any]:
    """Return the answer; docs/plan.md describes its fields. Raises `UsageError` for a layout that is not possible."""
    sizes, cluster = request.sizes, request.cluster
    batch = request.batch if request.batch is not None else default_batch(sizes, cluster.gpus)
    if not 1 <= batch <= 10**9:
        raise UsageError(f"--batch {batch}: give at least 1 sample")
    rows = [_row(text, request, batch, calibration) for text in request.layouts or usual_layouts(sizes, cluster)]
    best, fitting, looked_at = ([], 0, 0) if request.layouts else find_best(sizes, cluster, batch, calibration)
    if request.layouts:
        best = [
            estimate(
                configure_layout(parse_layout(row["layout"]), sizes, cluster, batch),
                cluster,
                calibration,
                row["layout"],
            )
            for row in rows
            if row["verdict"] == "fits"
        ]
        best = sorted(best, key=lambda one: one.seconds)[:3]
        fitting, looked_at = len(best), len(rows)
    width = calibration.half_width(cluster.gpu.name, "everyrank")
    fitted, case = calibration.fitted(cluster.gpu.name, "everyrank")
    shortlist = [_choice(one, request, batch, width, calibration) for one in best]
    outside = sorted({reason for choice in shortlist for reason in choice["outside"]})
    if outside:
        shortlist.sort(key=lambda choice: choice["layout"])
    result: dict[str, Any] = {
        "plan": 1,
        "model": {"name": request.name, "parameters": sizes.parameters, "flops_per_token": sizes.flops_per_token}
        | dataclasses.asdict(sizes),
        "cluster": cluster.as_json(),
        "batch": {"samples": batch, "tokens": batch * sizes.seq},
        "calibration": {
            "case": case,
            "sources": list(calibration.sources),
            "interval": 0.9,
            "factor": math.exp(width),
            **dataclasses.asdict(fitted),
        },
        "layouts": rows,
        "looked_at": looked_at,
        "fitting": fitting,
        "is_ranked": bool(shortlist) and not outside,
        "outside": outside,
        "shortlist": shortlist,
    }
    if request.tokens is not None and best:
        updates = request.tokens / (batch * sizes.seq)
        fastest = min(one.seconds for one in best)
        run = predict_run(fastest, updates, 12.0 * sizes.parameters, cluster, request.price, request.mtbf_hours)
        result["whole_run"] = {"tokens": request.tokens, "updates": updates} | dataclasses.asdict(run)
    return result


def _memory(one: Estimate) -> dict[str, Any]:
    memory = one.memory
    return {
        "categories": {name: float(np.max(memory.categories[name])) for name in CATEGORIES},
        "allocated_bytes": float(np.max(memory.allocated)),
        "reserved_bytes": float(np.max(memory.reserved)),
        "device_bytes": float(np.max(memory.device)),
        "most_bytes": float(np.max(memory.high)),
        "stage": int(np.max(memory.stage)),
    }


def _row(text: str, request: PlanRequest, batch: int, calibration: Calibration) -> dict[str, Any]:
    layout = parse_layout(text)
    try:
        c = configure_layout(layout, request.sizes, request.cluster, batch)
    except UsageError as error:
        if request.layouts:
            raise
        return {"layout": text, "verdict": "not possible", "reason": str(error).partition(": ")[2]}
    one = estimate(c, request.cluster, calibration, text)
    row: dict[str, Any] = {"layout": text, "verdict": one.verdict, "step_seconds": one.seconds} | _memory(one)
    row["micro_batch"] = int(np.max(c.micro))
    if one.verdict != "fits":
        change = smallest_change(layout, request.sizes, request.cluster, batch, calibration)
        row["change"] = (
            {"what": change[0], "layout": change[1], "command": _command("train", change[1], request, batch)}
            if change
            else {"what": _more_gpus(layout, request, batch, calibration)}
        )
    return row


def _more_gpus(layout: Layout, request: PlanRequest, batch: int, calibration: Calibration) -> str:
    """What is left where no layout fits on these GPUs: more of them."""
    del layout
    cluster = request.cluster
    for factor in (2, 4, 8, 16, 32, 64, 128):
        larger = dataclasses.replace(
            cluster,
            gpus=cluster.gpus * factor,
            per_node=min(8, cluster.gpus * factor) if cluster.gpus < 8 else cluster.per_node,
        )
        samples = max(batch, larger.gpus) if request.batch is None else batch
        if find_best(request.sizes, larger, samples, calibration)[0]:
            return f"no layout fits on {cluster.gpus}; {larger.gpus} GPUs are enough"
    return f"no layout fits on {cluster.gpus}, nor on {cluster.gpus * 128} GPUs; shorten the samples or the vocabulary"


def _command(verb: str, layout: str, request: PlanRequest, batch: int) -> str:
    """Return the exact command line for a layout; with several nodes it is started on each of them."""
    words = f"everyrank {verb} {request.workload} --layout {shlex.quote(layout)} --batch {batch}"
    nodes = request.cluster.gpus // request.cluster.per_node
    if nodes > 1:
        return f"{words} --launcher slurm --nodes {nodes} --processes {request.cluster.gpus}"
    return f"{words} --processes {request.cluster.gpus}"


def _choice(one: Estimate, request: PlanRequest, batch: int, width: float, calibration: Calibration) -> dict[str, Any]:
    sizes, cluster = request.sizes, request.cluster
    tokens = batch * sizes.seq / one.seconds
    parts = {name: float(np.max(seconds)) for name, seconds in one.time.parts.items()}
    return {
        "layout": one.layout,
        "step_seconds": one.seconds,
        "low_seconds": one.seconds * math.exp(-width),
        "high_seconds": one.seconds * math.exp(width),
        "tokens_per_second": tokens,
        "samples_per_second": tokens / sizes.seq,
        "share_of_peak": tokens * sizes.flops_per_token / (cluster.gpu.flops * cluster.gpus),
        "bound": one.bound,
        "parts": parts,
        "outside": calibration.outside(one.configuration, cluster.gpus),
        "commands": {
            "train": _command("train", one.layout, request, batch),
            "bench": _command("bench", one.layout, request, batch),
        },
    } | _memory(one)
