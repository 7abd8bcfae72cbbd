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
    """The arguments of a plan.

    sizes     the decoder; name: its name in the answer
    workload  the workload in commands, quoted for a shell
    batch     samples of an update; None: `default_batch`
    layouts   the requested layouts; empty: all
    tokens    number of tokens of the whole run; price: of a GPU for an hour; mtbf_hours: between failures of the job
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
    candidates, fitting, looked_at = ([], 0, 0) if request.layouts else find_best(sizes, cluster, batch, calibration)
    if request.layouts:
        candidates = [
            estimate(
                configure_layout(parse_layout(row["layout"]), sizes, cluster, batch),
                cluster,
                calibration,
                row["layout"],
            )
            for row in rows
            if row["verdict"] == "fits"
        ]
        candidates = sorted(candidates, key=lambda candidate: candidate.seconds)[:3]
        fitting, looked_at = len(candidates), len(rows)
    half_width = calibration.half_width(cluster.gpu.name, "everyrank")
    fitted, case = calibration.fitted(cluster.gpu.name, "everyrank")
    shortlist = [_choice(candidate, request, batch, half_width, calibration) for candidate in candidates]
    unmeasured = sorted({reason for choice in shortlist for reason in choice["outside"]})
    if unmeasured:
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
            "factor": math.exp(half_width),
            **dataclasses.asdict(fitted),
        },
        "layouts": rows,
        "looked_at": looked_at,
        "fitting": fitting,
        "is_ranked": bool(shortlist) and not unmeasured,
        "outside": unmeasured,
        "shortlist": shortlist,
    }
    if request.tokens is not None and candidates:
        updates = request.tokens / (batch * sizes.seq)
        fastest = min(candidate.seconds for candidate in candidates)
        run = predict_run(fastest, updates, 12.0 * sizes.parameters, cluster, request.price, request.mtbf_hours)
        result["whole_run"] = {"tokens": request.tokens, "updates": updates} | dataclasses.asdict(run)
    return result


def _memory(candidate: Estimate) -> dict[str, Any]:
    memory = candidate.memory
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
        configuration = configure_layout(layout, request.sizes, request.cluster, batch)
    except UsageError as error:
        if request.layouts:
            raise
        return {"layout": text, "verdict": "not possible", "reason": str(error).partition(": ")[2]}
    candidate = estimate(configuration, request.cluster, calibration, text)
    row: dict[str, Any] = {"layout": text, "verdict": candidate.verdict, "step_seconds": candidate.seconds} | _memory(
        candidate
    )
    row["micro_batch"] = int(np.max(configuration.micro))
    if candidate.verdict != "fits":
        change = smallest_change(layout, request.sizes, request.cluster, batch, calibration)
        row["change"] = (
            {"what": change[0], "layout": change[1], "command": _command("train", change[1], request, batch)}
            if change
            else {"what": _more_gpus(layout, request, batch, calibration)}
        )
    return row


def _more_gpus(layout: Layout, request: PlanRequest, batch: int, calibration: Calibration) -> str:
    """Return a message with the number of GPUs on which a layout fits."""
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
    """Return the command line for a layout; with several nodes, by Slurm."""
    command = f"everyrank {verb} {request.workload} --layout {shlex.quote(layout)} --batch {batch}"
    if parse_layout(layout).axis is None:
        return f"{command} --processes 1"
    nodes = request.cluster.gpus // request.cluster.per_node
    if nodes > 1:
        return f"{command} --launcher slurm --nodes {nodes} --processes {request.cluster.gpus}"
    return f"{command} --processes {request.cluster.gpus}"


def _choice(
    candidate: Estimate, request: PlanRequest, batch: int, half_width: float, calibration: Calibration
) -> dict[str, Any]:
    sizes, cluster = request.sizes, request.cluster
    tokens = batch * sizes.seq / candidate.seconds
    parts = {name: float(np.max(seconds)) for name, seconds in candidate.time.parts.items()}
    return {
        "layout": candidate.layout,
        "step_seconds": candidate.seconds,
        "low_seconds": candidate.seconds * math.exp(-half_width),
        "high_seconds": candidate.seconds * math.exp(half_width),
        "tokens_per_second": tokens,
        "samples_per_second": tokens / sizes.seq,
        "share_of_peak": tokens * sizes.flops_per_token / (cluster.gpu.flops * cluster.gpus),
        "bound": candidate.bottleneck,
        "parts": parts,
        "outside": calibration.outside(candidate.configuration, cluster.gpus),
        "commands": {
            "train": _command("train", candidate.layout, request, batch),
            "bench": _command("bench", candidate.layout, request, batch),
        },
    } | _memory(candidate)
