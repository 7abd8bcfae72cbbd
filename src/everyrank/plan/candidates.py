"""Convert layouts to configurations and back, enumerate the layouts of a decoder on a cluster, and find the fastest."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from everyrank.errors import UsageError
from everyrank.layout import Layout
from everyrank.layout.options import (
    BuildOptions,
    CompressOptions,
    DeviceOptions,
    FSDPOptions,
    LocalSGDOptions,
    PipelineOptions,
    TensorOptions,
)
from everyrank.plan.calibration import Calibration
from everyrank.plan.changes import smaller_layouts
from everyrank.plan.configuration import STACKS, Configurations, Stack, make_configurations
from everyrank.plan.decoder import DecoderSizes
from everyrank.plan.hardware import Cluster
from everyrank.plan.memory import Memory, predict_memory
from everyrank.plan.step_time import StepTime, predict_step

__all__ = [
    "TIE",
    "Estimate",
    "configure_layout",
    "default_batch",
    "enumerate_layouts",
    "estimate",
    "find_best",
    "layout_text",
    "smallest_change",
    "usual_layouts",
]

TIE = 0.05  # the order of two layouts within this fraction of each other is not reliable
_SCHEDULES = ("1f1b", "gpipe", "zero-bubble")
_MAX_ROWS = 40_000_000
_SMALLER = (2, 4, 8, 16, 32, 64, 128, 256)  # factors of smaller micro-batches


@dataclass(frozen=True)
class Estimate:
    """One configuration with its memory and time.

    layout   as the user types it
    index    row of `configuration`
    verdict  fits, may not fit (the GPU's memory is between the low and the high estimate) or does not fit
    """

    layout: str
    verdict: str
    index: int
    configuration: Configurations
    memory: Memory
    time: StepTime
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of an update."""
        return float(np.max(self.time.total))

    @property
    def bottleneck(self) -> str:
        """The phase that takes longest."""
        return max(self.time.parts, key=lambda phase: float(np.max(self.time.parts[phase])))


def default_batch(sizes: DecoderSizes, gpus: int) -> int:
    """Return the default samples of an update: 2 for each GPU, up to 16 million tokens as for Llama 3.

    It is a multiple of the GPUs if so many tokens allow one sample for each.
    """
    max_batch = max(1, 2**24 // sizes.seq)
    return min(2 * gpus, max_batch // gpus * gpus or max_batch)


def _stack(precision: str, zero: int) -> Stack:
    if precision == "float32":
        stack = STACKS["everyrank-float32"]
        return stack if zero == 3 else replace(stack, fsdp_root=False, holds_gradients=True)
    return STACKS["everyrank-fsdp" if zero == 3 else "everyrank-autocast"]


def configure_layout(layout: Layout, sizes: DecoderSizes, cluster: Cluster, batch: int) -> Configurations:
    """Return the configuration of a layout. Raises `UsageError` for a layout whose memory and time plan cannot predict.

    Supported strategies are single, ddp, zero1, fsdp, tensor, context, pipeline and local_sgd.
    """
    text = str(layout)
    if layout.strategy not in ("single", "ddp", "zero1", "fsdp", "tensor", "context", "pipeline", "local_sgd"):
        raise UsageError(
            f"--layout {text}: {layout.strategy} is not supported for a decoder. Give a workload instead, which plan "
            f"traces: everyrank plan my_workload.py --layout {text}"
        )
    compress, devices = layout.read(CompressOptions).compress, layout.read(DeviceOptions).devices
    for key, is_set in (
        (f"simulated={layout.simulated}", layout.simulated > 0),
        (f"compress={compress}", compress != "none"),
        (f"devices={devices}", devices > 1),
    ):
        if is_set:
            raise UsageError(f"--layout {text}: {key} is not supported for a decoder; leave it out, or give a workload")
    if layout.precision == "float64":
        raise UsageError(f"--layout {text}: float64 is for tests; give float32 or bf16")
    degrees = layout.mesh(cluster.gpus) if layout.axis else {}
    if degrees.get("expert", 1) > 1:
        raise UsageError(f"--layout {text}: experts are not supported for a decoder; leave out expert")
    tensor, pipeline = degrees.get("tensor", 1), degrees.get("pipeline", 1)
    if sizes.heads % tensor or sizes.kv % tensor or sizes.ffn % tensor:
        raise UsageError(
            f"--layout {text}: tensor={tensor} does not divide {sizes.heads} heads, {sizes.kv} key-value heads "
            f"and an MLP width of {sizes.ffn}; give a common divisor"
        )
    if pipeline > sizes.layers:
        raise UsageError(f"--layout {text}: {pipeline} stages for {sizes.layers} blocks; give at most {sizes.layers}")
    context = degrees.get("context", 1)
    if sizes.seq % context:
        raise UsageError(f"--layout {text}: context={context} does not divide {sizes.seq} tokens; give a divisor")
    options = layout.read(PipelineOptions) if layout.strategy == "pipeline" else PipelineOptions()
    num_micro_batches = layout.accumulate
    if layout.strategy == "pipeline":
        num_micro_batches *= options.microbatches or 2 * pipeline
    data_ranks = degrees.get("replicate", 1) * degrees.get("shard", 1)
    if batch % (num_micro_batches * data_ranks):
        raise UsageError(
            f"--layout {text}: {batch} samples do not divide into {num_micro_batches} micro-batches on each of "
            f"{data_ranks} data ranks; "
            f"give --batch {math.ceil(batch / (num_micro_batches * data_ranks)) * num_micro_batches * data_ranks}"
        )
    zero = 3 if layout.strategy == "fsdp" or degrees.get("shard", 1) > 1 else 1 if layout.strategy == "zero1" else 0
    columns: dict[str, Any] = {
        "tensor": tensor,
        "pipeline": pipeline,
        "context": context,
        "replicate": degrees.get("replicate", 1),
        "shard": degrees.get("shard", 1),
        "zero": zero,
        "micro": batch // (num_micro_batches * data_ranks),
        "accumulate": num_micro_batches,
        "recompute": int(layout.recompute),
        "compiled": int(layout.compile),
        "sequence": int(layout.read(TensorOptions).sequence) if tensor > 1 else 0,
        "schedule": _SCHEDULES.index(options.schedule) if options.schedule in _SCHEDULES else 0,
        "chunks": options.chunks if options.schedule == "interleaved" else 1,
        "per_node": cluster.per_node,
        "keeps_gathered": int(layout.strategy == "fsdp" and not layout.read(FSDPOptions).reshard_after_forward),
        "averaging": layout.read(LocalSGDOptions).every if layout.strategy == "local_sgd" else 0,
        "whole_first": 0 if layout.read(BuildOptions).meta and BuildOptions in layout.row.options else 4,
    }
    stack = replace(_stack(layout.precision, zero), ends_everywhere=pipeline > 1)
    return make_configurations(sizes, stack, columns)


def layout_text(c: Configurations, index: int) -> str:
    """Return the layout of one row as the user types it."""

    def at(name: str) -> int:
        value = np.asarray(getattr(c, name))
        return int(value[index]) if value.ndim else int(value)

    axes = {axis: at(axis) for axis in ("replicate", "shard", "context", "tensor")}
    options: list[str] = []
    if at("pipeline") > 1:
        name = "pipeline"
        options.append(f"pipeline={at('pipeline')}")
        options += [f"{axis}={axes[axis]}" for axis in ("replicate", "shard", "tensor") if axes[axis] > 1]
        options.append(f"microbatches={at('accumulate')}")
        if at("chunks") > 1:
            options += ["schedule=interleaved", f"chunks={at('chunks')}"]
    else:
        name = "fsdp" if at("zero") == 3 else "zero1" if at("zero") == 1 else "ddp"
        if axes["replicate"] > 1 and name == "fsdp":
            options.append(f"replicate={axes['replicate']}")
        options += [f"{axis}={axes[axis]}" for axis in ("context", "tensor") if axes[axis] > 1]
        if name == "ddp" and axes["replicate"] == 1 and axes["context"] == 1:
            name, options = ("tensor", []) if axes["tensor"] > 1 else ("single", [])
        elif name == "ddp" and axes["replicate"] == 1 and axes["tensor"] == 1:
            name, options = "context", []
        if at("accumulate") > 1:
            options.append(f"accumulate={at('accumulate')}")
    if at("size") < 4:
        options.append("precision=bf16")
    options += ["recompute"] if at("recompute") else []
    options += ["sequence=true"] if at("sequence") else []
    options += ["meta=true"] if name in ("fsdp", "pipeline", "tensor") and not at("whole_first") else []
    return name + (":" + ",".join(options) if options else "")


def estimate(c: Configurations, cluster: Cluster, calibration: Calibration, layout: str | None = None) -> Estimate:
    """Return the estimate of a single configuration."""
    memory, time = predict_memory(c), predict_step_of(c, cluster, calibration)
    verdict = verdicts(memory, cluster)[()]
    return Estimate(layout or layout_text(c, 0), str(verdict), 0, c, memory, time)


def predict_step_of(c: Configurations, cluster: Cluster, calibration: Calibration) -> StepTime:
    """Return the time of configurations on a cluster, with the numbers fitted for its GPU kind."""
    fitted, _ = calibration.fitted(cluster.gpu.name, "everyrank")
    return predict_step(c, cluster.gpu, cluster.inside, cluster.across, fitted)


def verdicts(memory: Memory, cluster: Cluster) -> Any:
    """Return "fits", "may not fit" or "does not fit" for each row. "fits" means that even the high estimate fits."""
    gpu_memory = cluster.gpu.memory
    may_fit = np.where(memory.low > gpu_memory, "does not fit", "may not fit")
    return np.where(memory.high <= gpu_memory, "fits", may_fit)


def usual_layouts(sizes: DecoderSizes, cluster: Cluster) -> list[str]:
    """Return the layouts to show by default: one of each kind, for a cluster of this size."""
    gpus, node = cluster.gpus, cluster.per_node
    if gpus == 1:
        return ["single:precision=bf16"]
    texts = ["ddp:precision=bf16", "zero1:precision=bf16", "fsdp:precision=bf16,meta=true"]
    if gpus > node:
        texts.append(f"fsdp:replicate={gpus // node},precision=bf16,meta=true")
    tensor = math.gcd(math.gcd(node, sizes.kv), math.gcd(sizes.heads, sizes.ffn))
    if tensor > 1:
        texts.append(f"fsdp:tensor={tensor},precision=bf16,sequence=true,meta=true")
    stages = max((s for s in (2, 4, 8) if s <= sizes.layers and gpus % s == 0), default=1)
    if stages > 1:
        texts.append(
            f"pipeline:pipeline={stages},replicate={gpus // stages},microbatches={stages},precision=bf16,meta=true"
        )
    return texts


def smallest_change(
    layout: Layout, sizes: DecoderSizes, cluster: Cluster, batch: int, calibration: Calibration
) -> tuple[str, str, int] | None:
    """Return the smallest change that makes a layout fit, as (change, layout, samples of an update), or None.

    The last change to be tried is the fastest layout that fits.
    """
    for name, changed in smaller_layouts(layout, True, _SMALLER, (1, *_SMALLER), meta=True):
        if _fits(changed, sizes, cluster, batch, calibration):
            return name, str(changed), batch
    best = find_best(sizes, cluster, batch, calibration)[0]
    if best:
        return "a different layout", best[0].layout, batch
    return None


def _fits(layout: Layout, sizes: DecoderSizes, cluster: Cluster, batch: int, calibration: Calibration) -> bool:
    try:
        c = configure_layout(layout, sizes, cluster, batch)
    except UsageError:
        return False
    return estimate(c, cluster, calibration).verdict == "fits"


def _divisors(number: int, max_value: int) -> list[int]:
    return [value for value in range(1, min(number, max_value) + 1) if number % value == 0]


def enumerate_layouts(sizes: DecoderSizes, cluster: Cluster, batch: int) -> Configurations | None:
    """Return every layout of a decoder on a cluster, in bf16, as columns; None if no layout divides the batch."""
    gpus = cluster.gpus
    tensors = [t for t in _divisors(gpus, 64) if sizes.heads % t == 0 and sizes.kv % t == 0 and sizes.ffn % t == 0]
    stages = [p for p in _divisors(gpus, sizes.layers) if sizes.layers % p == 0]
    contexts = [c for c in _divisors(gpus, 64) if sizes.seq % (2 * c) == 0 or c == 1]
    shards = _divisors(gpus, gpus)
    micros = [m for m in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256) if m <= batch]
    grid = np.meshgrid(tensors, stages, contexts, shards, micros, (0, 1), (0, 1, 3), (1, 2), indexing="ij")
    t, p, c, s, m, recompute, zero, chunks = (axis.reshape(-1) for axis in grid)
    if len(t) > _MAX_ROWS:
        raise UsageError(f"{gpus} GPUs: too many layouts to search; give --layout")
    ranks_per_replica = t * p * c * s
    keep = (
        (gpus % ranks_per_replica == 0)
        & ((zero == 3) | (s == 1))
        & ((chunks == 1) | ((p > 1) & (sizes.layers % (p * chunks) == 0)))
    )
    t, p, c, s, m, recompute, zero, chunks, ranks_per_replica = (
        axis[keep] for axis in (t, p, c, s, m, recompute, zero, chunks, ranks_per_replica)
    )
    r = gpus // ranks_per_replica
    data_ranks = r * s
    num_micro_batches = batch // np.maximum(m * data_ranks, 1)
    keep = num_micro_batches * m * data_ranks == batch
    keep &= (zero != 1) | ((t == 1) & (p == 1) & (c == 1) & (r > 1))  # zero1 is for replicas only
    keep &= (zero != 3) | (s * c > 1) | (t > 1)
    keep &= (zero != 3) | (p == 1) | (s > 1)
    # tensor parallelism with replicas or context needs fsdp or pipeline
    keep &= (zero != 0) | (t == 1) | (p > 1) | ((r == 1) & (c == 1))
    keep &= (p == 1) | (c == 1)  # everyrank's pipeline has no context axis
    keep &= (p == 1) | (num_micro_batches >= p)
    if not keep.any():
        return None
    t, p, c, s, m, recompute, zero, chunks, r, num_micro_batches = (
        axis[keep] for axis in (t, p, c, s, m, recompute, zero, chunks, r, num_micro_batches)
    )
    columns = {
        "tensor": t, "pipeline": p, "context": c, "shard": s, "replicate": r, "micro": m,
        "accumulate": num_micro_batches, "recompute": recompute, "zero": zero, "chunks": chunks,
        "sequence": (t > 1) & (p == 1), "per_node": cluster.per_node,
        "whole_first": np.where((zero == 3) | (t > 1) | (p > 1), 0, 4),
    }  # fmt: skip
    configurations = make_configurations(sizes, STACKS["everyrank-fsdp"], columns)
    autocast = STACKS["everyrank-autocast"]
    for name in ("residual", "weight_copies", "fsdp_root", "gathered_inputs", "holds_gradients"):
        setattr(
            configurations, name, np.where(zero == 3, getattr(configurations, name), float(getattr(autocast, name)))
        )
    configurations.ends_everywhere = np.where(p > 1, 1.0, 0.0)
    return configurations


def find_best(
    sizes: DecoderSizes, cluster: Cluster, batch: int, calibration: Calibration, max_layouts: int = 3
) -> tuple[list[Estimate], int, int]:
    """Return (the fastest layouts that fit, how many fit, how many were considered).

    The first is the fastest; the others are of a different kind and within `TIE` of it.
    """
    columns = enumerate_layouts(sizes, cluster, batch)
    if columns is None:
        return [], 0, 0
    memory = predict_memory(columns)
    fits = np.flatnonzero(np.atleast_1d(verdicts(memory, cluster)) == "fits")
    num_considered = len(columns)
    if not len(fits):
        return [], 0, num_considered
    fitting = columns.take(fits)
    seconds = np.atleast_1d(predict_step_of(fitting, cluster, calibration).total)
    # among equal times, the layout with the fewest axes
    axes = np.zeros(len(seconds))
    for axis in ("tensor", "pipeline", "context", "replicate"):
        axes = axes + np.asarray(getattr(fitting, axis) > 1, float)
    order = np.lexsort((axes, seconds))
    chosen: list[Estimate] = []
    kinds: set[tuple[float, ...]] = set()
    for index in order[:5000]:
        if chosen and (seconds[index] > chosen[0].seconds * (1 + TIE) or len(chosen) == max_layouts):
            break
        candidate = fitting.take(np.array([index]))
        has_axis = tuple(bool(np.max(getattr(candidate, n)) > 1) for n in ("tensor", "pipeline", "context"))
        kind = (*has_axis, float(np.max(candidate.zero)))
        if kind not in kinds:
            kinds.add(kind)
            chosen.append(_estimate_of_row(candidate, cluster, calibration))
    return chosen, len(fits), num_considered


def _estimate_of_row(configuration: Configurations, cluster: Cluster, calibration: Calibration) -> Estimate:
    memory = predict_memory(configuration)
    verdict = str(np.atleast_1d(verdicts(memory, cluster))[0])
    return Estimate(
        layout_text(configuration, 0),
        verdict,
        0,
        configuration,
        memory,
        predict_step_of(configuration, cluster, calibration),
    )
