"""The plan of a user's workload: the fullest rank of each layout, traced from the real code on fake tensors.

If a model has more than 12 blocks and all are equal, two depths are traced and extrapolated, because memory, operations
and communication are linear in the number of blocks. A pipeline needs more than 6 blocks for each stage. For a model
that fake tensors cannot run (shapes that depend on values), only parameters, gradients and optimizer state are counted,
and the verdict is never `fits`.

Reserved memory is that of torch's caching allocator, replayed from the model's construction to the end of the second
update.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import itertools
import math
import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from everyrank.errors import EveryrankError, UsageError, WorkloadError, describe
from everyrank.layout import Layout, parse_layout
from everyrank.layout.options import LocalSGDOptions, PipelineOptions
from everyrank.parallel.init_model import on_cpu
from everyrank.parallel.parallelize import find_blocks
from everyrank.parallel.state_memory import optimizer_tensors
from everyrank.parallel.zero1 import assign_owners
from everyrank.plan.caching_allocator import replay
from everyrank.plan.calibration import Calibration, shipped_calibration
from everyrank.plan.changes import smaller_layouts
from everyrank.plan.hardware import GIB, GPUS, Cluster
from everyrank.plan.machine import Machine, pipeline_bubble, traced_seconds
from everyrank.plan.pretend import TracedStep, read_samples, shapes_of, trace_step
from everyrank.plan.roofline import roofline_parts, roofline_sums
from everyrank.workload import Workload

__all__ = ["LayoutMemory", "Timing", "answer_workload", "time_layout", "trace_layout"]

_SAMPLES = 3  # to see whether they differ in size
_TRACED_BLOCKS = 12  # with more equal blocks, two depths are traced and extrapolated
_FRAGMENTATION = 1.10  # reserved / allocated bytes where the caching allocator is not replayed (CPU, or no trace)
_NUM_BUILD_SECTIONS = 3  # sections of a trace before the second update
_EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
# upper bound of reserved / replayed bytes; the largest measured on an H100 is 1.03 (docs/plan.md). Kernels need
# temporary memory, and tensors are freed in a different order.
_MAX_RESERVED = 1.15
_CONTEXT, _MAX_CONTEXT = 1.0 * GIB, 2.5 * GIB  # memory of CUDA and NCCL


@dataclass(frozen=True)
class LayoutMemory:
    """Bytes of the fullest rank of a layout.

    categories       allocated bytes by category at the peak of an update; allocated: the overall peak
    building         allocated bytes while the model is built and in the first update
    reserved         bytes that torch's caching allocator reserves on a GPU, by a replay; expandable: the same with
                     expandable_segments:True, which leaves fewer gaps
    flops            FLOPs of matrix products and attention in an update on that rank
    moved, sent      bytes that operators except collectives read or write; bytes of collectives
    has_activations  False if activations are unknown
    note             how the layout was traced, or why it could not be
    seconds_by_part  seconds of an update by part, if requested
    peaks            allocated peaks by section of the trace (see `TracedStep.ends`)
    on_gpu           whether CUDA and NCCL take memory besides
    """

    rank: int
    categories: Mapping[str, float]
    allocated: float
    building: float
    reserved: float
    expandable: float
    flops: float
    moved: float
    sent: float
    collectives: Mapping[str, int]
    has_activations: bool
    note: str
    seconds_by_part: Mapping[str, float] = field(default_factory=dict[str, float])
    peaks: tuple[float, ...] = ()
    on_gpu: bool = True

    def verdict(self, memory: float) -> str:
        """Return fits, may not fit or does not fit."""
        if self.allocated > memory:
            return "does not fit"
        return "fits" if self.has_activations and self.max_device_bytes <= memory else "may not fit"

    @property
    def device_bytes(self) -> float:
        """The device total: reserved bytes with CUDA's context and NCCL."""
        return self.reserved + (_CONTEXT if self.on_gpu else 0.0)

    @property
    def max_device_bytes(self) -> float:
        """The upper estimate of the device total."""
        return self.reserved * _MAX_RESERVED + (_MAX_CONTEXT if self.on_gpu else 0.0)

    def with_expandable_segments(self) -> LayoutMemory:
        """Return the memory with `expandable_segments:True`."""
        return dataclasses.replace(self, reserved=self.expandable)


@dataclass(frozen=True)
class Timing:
    """How long a traced step takes.

    sums    returns seconds by kind that are linear in the number of blocks, so that they can be extrapolated
    parts   returns the seconds of an update by part, from these sums
    """

    sums: Callable[[TracedStep], Mapping[str, float]]
    parts: Callable[[Mapping[str, float]], Mapping[str, float]]


def trace_layout(
    workload: Workload, layout: Layout, size: int, sample: Any, on_gpu: bool = False, timing: Timing | None = None
) -> LayoutMemory:
    """Return the memory of the fullest rank; for a pipeline, of the fuller of the first and the last rank.

    Raises `UsageError` for layouts that do not support the workload.

    `sample` is (input, target) of one collated sample; `on_gpu` as for `trace_step`; `timing` gives the seconds
    of a traced step by part, and those of the slowest rank are kept.
    """
    if layout.strategy == "dataparallel" and size > 1:
        raise UsageError(
            f"--layout {layout}: plan cannot trace several devices of one process; use ddp (one process per device)"
        )
    size = 1 if layout.axis is None else size
    try:
        ranks = _ranks_to_trace(workload, layout, size)
        memory_by_rank = [_trace_rank(workload, layout, size, rank, sample, on_gpu, timing) for rank in ranks]
    except EveryrankError:
        raise
    except (FileNotFoundError, PermissionError) as error:  # raised by the workload, which also fails on real tensors
        raise WorkloadError(describe(error)) from error
    except Exception as error:  # fake tensors may raise any exception
        return _memory_of_parameters(workload, layout, size, error)
    slowest = max(memory_by_rank, key=lambda memory: sum(memory.seconds_by_part.values()))
    fullest = max(memory_by_rank, key=lambda memory: memory.allocated)
    return dataclasses.replace(fullest, seconds_by_part=slowest.seconds_by_part)


def _ranks_to_trace(workload: Workload, layout: Layout, size: int) -> list[int]:
    """Return the ranks of which one is the fullest. Under zero1 the ranks own different amounts of state."""
    if layout.strategy == "pipeline":
        return sorted({0, size - 1})
    if layout.strategy != "zero1":
        return [0]
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():  # as `trace_step` builds it
        warnings.simplefilter("ignore")
        trained = [parameter for parameter in on_cpu(workload).parameters() if parameter.requires_grad]
    owned_bytes = [0] * size
    for parameter, owner in zip(trained, assign_owners(trained, size), strict=True):
        owned_bytes[owner] += parameter.nbytes
    return [owned_bytes.index(max(owned_bytes))]


def time_layout(
    workload: Workload, layout: Layout, size: int, sample: Any, machine: Machine, backend: str
) -> dict[str, float]:
    """Return the seconds of an update by part on a measured machine, of the rank that takes longest.

    The data loader is not included. Raises `UsageError` for a strategy that the machine was not measured for.
    """
    on_gpu = machine.device != "cpu"
    size = 1 if layout.axis is None else size
    traced = [trace_step(workload, layout, size, rank, sample, on_gpu) for rank in range(size)]
    footprint = max(step.peak_bytes for step in traced)
    return traced_seconds([step.operators for step in traced], layout.strategy, machine, backend, footprint)


def _idle_share(layout: Layout, size: int) -> float:
    """Return the share of a step in which the ranks of a pipeline are idle; 0 for other layouts."""
    if layout.strategy != "pipeline":
        return 0.0
    stages, options = layout.mesh(size).get("pipeline", 1), layout.read(PipelineOptions)
    relative_to_1f1b = {"interleaved": 1 / options.chunks, "zero-bubble": 1 / 3}.get(options.schedule, 1.0)
    return pipeline_bubble(stages, options.microbatches or 2 * stages, relative_to_1f1b)


def _trace_rank(
    workload: Workload, layout: Layout, size: int, rank: int, sample: Any, on_gpu: bool, timing: Timing | None
) -> LayoutMemory:
    def traced(traced_workload: Workload, note: str) -> LayoutMemory:
        step = trace_step(traced_workload, layout, size, rank, sample, on_gpu)
        memory = _memory_of(step, on_gpu, note + _not_traced(layout))
        if timing is not None and step.is_recurrent:
            reason = "no roofline estimate, because on a GPU an RNN is one fused kernel, which the trace does not show"
            return dataclasses.replace(memory, note=f"{memory.note}; {reason}")
        # sums for now, which are extrapolated; `with_time` computes the parts from them
        return dataclasses.replace(memory, seconds_by_part=timing.sums(step)) if timing is not None else memory

    def with_time(memory: LayoutMemory) -> LayoutMemory:
        if timing is None or not memory.seconds_by_part:
            return memory
        return dataclasses.replace(memory, seconds_by_part=timing.parts(memory.seconds_by_part))

    depths = _depths(workload, layout, size)
    if depths is not None:
        num_blocks, first, second = depths
        note = f"traced with {first} and {second} of {num_blocks} blocks, which are equal"
        with contextlib.suppress(Exception):  # forward may need all blocks, such as `for i in range(n): blocks[i](x)`
            shallow, deep = (traced(_with_first_blocks(workload, count), note) for count in (first, second))
            return with_time(_extrapolated(shallow, deep, (num_blocks - first) / (second - first)))
    return with_time(traced(workload, "traced whole"))


def _not_traced(layout: Layout) -> str:
    """Return what a trace of this layout lacks, for its note."""
    every = layout.read(LocalSGDOptions).every if layout.strategy == "local_sgd" else 1
    average = f"; the average after each {every} updates is in the memory, but not in the time" if every > 1 else ""
    return average + ("; without torch.compile" if layout.compile else "")


def _extrapolated(shallow: LayoutMemory, deep: LayoutMemory, factor: float) -> LayoutMemory:
    """Return the memory of a deeper model, extrapolated linearly: shallow + factor * (deep - shallow).

    A peak is the largest of several moments, and a different one may be the largest in a deeper model. For example, the
    peak is in the loss with few blocks and a large vocabulary, and in the optimizer step with many blocks. So sections
    are extrapolated one by one.
    """

    def extrapolate(a: float, b: float) -> float:
        return a + (b - a) * factor

    names = [*shallow.categories, *(name for name in deep.categories if name not in shallow.categories)]
    categories = {
        name: extrapolate(shallow.categories.get(name, 0.0), deep.categories.get(name, 0.0)) for name in names
    }
    calls = {
        name: round(extrapolate(shallow.collectives.get(name, 0), deep.collectives.get(name, 0)))
        for name in deep.collectives
    }
    peaks = tuple(map(extrapolate, shallow.peaks, deep.peaks))
    update_peak = max(peaks[_NUM_BUILD_SECTIONS:])
    temporary = categories.get("temporary", 0.0) + update_peak - sum(categories.values())
    allocated = max(peaks)
    # Fragmentation of the allocator grows in steps, so a line through two depths may underestimate it.
    fragmentation = deep.reserved / deep.allocated, deep.expandable / deep.allocated
    return LayoutMemory(
        deep.rank,
        categories | {"temporary": temporary},
        allocated,
        max(peaks[:_NUM_BUILD_SECTIONS]),
        max(extrapolate(shallow.reserved, deep.reserved), allocated * fragmentation[0]),
        max(extrapolate(shallow.expandable, deep.expandable), allocated * fragmentation[1]),
        extrapolate(shallow.flops, deep.flops),
        extrapolate(shallow.moved, deep.moved),
        extrapolate(shallow.sent, deep.sent),
        calls,
        True,
        deep.note,
        {name: extrapolate(shallow.seconds_by_part[name], seconds) for name, seconds in deep.seconds_by_part.items()},
        peaks,
        deep.on_gpu,
    )


def _memory_of(step: TracedStep, on_gpu: bool, note: str) -> LayoutMemory:
    moved = sum(operator.bytes for operator in step.operators if not operator.group)
    sent = sum(operator.bytes for operator in step.operators if operator.group and operator.name != "wait_tensor")
    categories = {name: float(count) for name, count in step.categories.items()}
    if on_gpu:
        replayed = replay(step.events, step.ends)
        peaks, reserved = replayed.peaks, float(replayed.reserved)
        categories["rounding"] = float(max(peaks[_NUM_BUILD_SECTIONS:]) - step.peak_bytes)
        expandable = float(replay(step.events, step.ends, expandable_segments=True).reserved)
    else:
        peaks = _live_peaks(step)
        reserved = expandable = _FRAGMENTATION * max(peaks)
    return LayoutMemory(
        step.rank,
        categories,
        float(max(peaks)),
        float(max(peaks[:_NUM_BUILD_SECTIONS])),
        reserved,
        expandable,
        float(step.flops),
        float(moved),
        float(sent),
        step.collectives(),
        True,
        note,
        peaks=tuple(map(float, peaks)),
        on_gpu=on_gpu,
    )


def _live_peaks(step: TracedStep) -> tuple[int, ...]:
    """Return the peak of live bytes in each section of a trace."""
    live = [0, *itertools.accumulate(change for change, *_ in step.events)]
    return tuple(max(live[start : end + 1]) for start, end in itertools.pairwise((0, *step.ends, len(step.events))))


def _depths(workload: Workload, layout: Layout, size: int) -> tuple[int, int, int] | None:
    """Return (number of blocks, first and second number to trace), or None if the whole model has to be traced."""
    if workload.blocks is None:
        return None
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            blocks = find_blocks(workload, workload.model())
        except EveryrankError:
            raise
        except Exception:
            return None
    kinds = {
        (type(block), tuple(_kind_of(tensor) for tensor in (*block.parameters(), *block.buffers()))) for block in blocks
    }
    stages = layout.mesh(size).get("pipeline", 1) if layout.strategy == "pipeline" else 1
    stages *= layout.read(PipelineOptions).chunks if layout.strategy == "pipeline" else 1
    count = len(blocks)
    if count <= _TRACED_BLOCKS or len(kinds) != 1 or (stages > 1 and count % stages):
        return None
    first, second = 4 * stages, 6 * stages
    return (count, first, second) if second < count else None


def _kind_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what the memory of a tensor depends on. A frozen parameter has no gradient and no optimizer state."""
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _with_first_blocks(workload: Workload, count: int) -> Workload:
    """Return the workload with the first `count` blocks of its model."""

    def model() -> nn.Module:
        whole = workload.model()
        assert workload.blocks is not None
        container = whole.get_submodule(workload.blocks)
        for name, _ in list(container.named_children())[count:]:
            delattr(container, name)
        return whole

    return dataclasses.replace(workload, model=model)


def _memory_of_parameters(workload: Workload, layout: Layout, size: int, error: Exception) -> LayoutMemory:
    """Return a lower bound of the memory of a model that cannot be traced: parameters, gradients, optimizer state.

    All are 0 if the model or its optimizer cannot be built.
    """
    first_line = (str(error).splitlines() or [""])[0][:200]
    reason = f"not traced: {type(error).__name__}: {first_line}"
    try:
        with FakeTensorMode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = workload.model()
            parameter_bytes, gradient_bytes = (
                float(sum(p.nbytes for p in model.parameters() if p.requires_grad or not trained_only))
                for trained_only in (False, True)
            )
            optimizer_bytes = float(_optimizer_bytes(workload, model))
    except Exception:
        return LayoutMemory(
            0, {}, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, {}, False, f"{reason}; the model's parameters are also unknown"
        )
    degrees = layout.mesh(size) if layout.axis else {}
    replicated_axes = ("replicate",) if layout.strategy == "fsdp" else ("replicate", "context")
    num_shards = math.prod(degree for axis, degree in degrees.items() if axis not in replicated_axes)
    num_state_shards = num_shards * (size if layout.strategy == "zero1" else 1)
    categories = {
        "parameters": parameter_bytes / num_shards,
        "gradients": gradient_bytes / num_shards,
        "optimizer": optimizer_bytes / num_state_shards,
    }
    note = f"{reason}; only parameters, gradients and the state of torch's optimizers are counted, activations are not"
    allocated = sum(categories.values())
    reserved = allocated * _FRAGMENTATION
    return LayoutMemory(0, categories, allocated, 0.0, reserved, reserved, 0.0, 0.0, 0.0, {}, False, note)


def _optimizer_bytes(workload: Workload, model: nn.Module) -> int:
    """Return the bytes that the workload's optimizer keeps for all trained parameters; 0 if unknown."""
    optimizer = workload.optimizer(model)
    return sum(
        optimizer_tensors(optimizer, group) * parameter.nbytes
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    )


def usual_workload_layouts(workload: Workload, size: int, per_node: int) -> list[str]:
    """Return the layouts to trace by default."""
    if size == 1:
        return ["single:precision=bf16", *(["single:precision=bf16,recompute"] if workload.blocks else [])]
    texts = ["ddp:precision=bf16", "zero1:precision=bf16", "fsdp:precision=bf16"]
    texts += ["fsdp:precision=bf16,recompute"] if workload.blocks else []
    if size > per_node and size % per_node == 0:
        texts.append(f"fsdp:replicate={size // per_node},precision=bf16")
    if workload.tensor_plan:
        texts.append(f"fsdp:tensor={min(per_node, size, 2)},precision=bf16")
    return texts


def answer_workload(
    workload: Workload,
    name: str,
    workload_args: str,
    cluster: Cluster,
    layouts: Sequence[str] = (),
    measured: tuple[Machine, str] | None = None,
) -> dict[str, Any]:
    """Return the result of `everyrank plan` for a workload; `workload_args` is the workload as typed in a shell.

    With `measured` (machine, backend), each row has the seconds of an update on that machine. Without it, rows have an
    estimate by a roofline, if the kind of GPU is known.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # a dataset may print
        candidates = read_samples(workload, _SAMPLES)
    sample = max(candidates, key=lambda candidate: sum(map(math.prod, shapes_of(candidate))))
    differ = any(shapes_of(candidate) != shapes_of(sample) for candidate in candidates)
    note = f"; samples differ in size, and the largest of {len(candidates)} was traced" if differ else ""
    cache: dict[str, LayoutMemory] = {}
    calibration = shipped_calibration() if measured is None and cluster.gpu.name in GPUS else None

    def memory_of(text: str) -> LayoutMemory:
        if text not in cache:
            gc.collect()
            layout, on_gpu = parse_layout(text), cluster.gpu.name != "cpu"
            lacks_rate = calibration is not None and layout.precision == "float64"
            timing = _roofline(layout, cluster) if calibration is not None and not lacks_rate else None
            memory = trace_layout(workload, layout, cluster.gpus, sample, on_gpu, timing)
            reason = "; no roofline estimate, because the table of GPUs has no rates of float64" if lacks_rate else ""
            cache[text] = dataclasses.replace(memory, note=memory.note + reason)
        return cache[text]

    rows: list[dict[str, Any]] = []
    for text in layouts or _layouts(workload, cluster, measured):
        try:
            memory = memory_of(text)
        except UsageError as error:
            if layouts:
                raise
            rows.append({"layout": text, "verdict": "not possible", "reason": str(error)})
            continue
        if measured is not None and memory.has_activations:  # otherwise the step cannot be traced
            seconds_by_part = time_layout(workload, parse_layout(text), cluster.gpus, sample, *measured)
            memory = dataclasses.replace(memory, seconds_by_part=seconds_by_part)
        memory = dataclasses.replace(memory, note=memory.note + note)
        rows.append(_row(text, memory, cluster) | _seconds(memory, calibration))
    for row in rows:
        if row["verdict"] in ("does not fit", "may not fit") and row["is_whole"]:
            row["change"] = _change(row["layout"], memory_of, cluster, workload_args, workload)
    fitting = [row for row in rows if row["verdict"] == "fits"]
    return {
        "plan": 1,
        "model": {"name": name},
        "cluster": cluster.as_json(),
        "batch": {"samples": workload.global_batch},
        "layouts": rows,
        "looked_at": len(rows),
        "fitting": len(fitting),
        "commands": [_command(row["layout"], workload_args, cluster) for row in fitting[:3]],
    }


def _layouts(workload: Workload, cluster: Cluster, measured: tuple[Machine, str] | None) -> list[str]:
    """Return the layouts to trace by default; on a measured machine, those that were measured."""
    if measured is None:
        return usual_workload_layouts(workload, cluster.gpus, cluster.per_node)
    return list(measured[0].overhead.get(measured[1], {}))


def _roofline(layout: Layout, cluster: Cluster) -> Timing:
    idle = _idle_share(layout, cluster.gpus)
    return Timing(
        lambda step: roofline_sums(step, layout.strategy, cluster), lambda sums: roofline_parts(sums, bubble=idle)
    )


def _seconds(memory: LayoutMemory, calibration: Calibration | None) -> dict[str, Any]:
    """Return the time entries of a row: seconds of an update and, with a calibration, their lower and upper bound.

    A roofline is not fitted to a kind of GPU or a software stack. So `half_width` gets names that the calibration does
    not have, and returns the half-width for predictions without fitted numbers.
    """
    if not memory.seconds_by_part:
        return {}
    seconds = sum(memory.seconds_by_part.values())
    entries: dict[str, Any] = {"step_seconds": seconds, "parts": dict(memory.seconds_by_part)}
    if calibration is not None:
        factor = math.exp(calibration.half_width("no kind", "no stack"))
        entries |= {"low_seconds": seconds / factor, "high_seconds": seconds * factor}
    return entries


def _row(text: str, memory: LayoutMemory, cluster: Cluster) -> dict[str, Any]:
    return {
        "layout": text,
        "verdict": memory.verdict(cluster.gpu.memory),
        "categories": dict(memory.categories),
        "allocated_bytes": memory.allocated,
        "building_bytes": memory.building,
        "reserved_bytes": memory.reserved,
        "device_bytes": memory.device_bytes,
        "most_bytes": memory.max_device_bytes,
        "rank": memory.rank,
        "flops": memory.flops,
        "collectives": dict(memory.collectives),
        "is_whole": memory.has_activations,
        "note": memory.note,
    }


def _change(text: str, memory_of: Any, cluster: Cluster, workload_args: str, workload: Workload) -> dict[str, Any]:
    """Return the first change that makes a layout fit.

    Tried in this order: a setting of torch's allocator, the changes of changes.py, and another layout. Each is traced,
    so only a few sizes of micro-batches are tried.
    """
    layout = parse_layout(text)
    if memory_of(text).with_expandable_segments().verdict(cluster.gpu.memory) == "fits":
        command = f"{_EXPANDABLE} {_command(text, workload_args, cluster)}"
        return {"what": "expandable segments of torch's allocator", "layout": text, "command": command}
    factors = [factor for factor in (2, 8) if workload.global_batch >= layout.accumulate * factor * cluster.gpus]
    steps = list(smaller_layouts(layout, workload.blocks is not None, factors, factors[-1:] or (1,)))
    others = ["fsdp:precision=bf16,recompute"] if workload.blocks else ["fsdp:precision=bf16"]
    steps += [("a different layout", parse_layout(other)) for other in others if cluster.gpus > 1]
    for change, changed in steps:
        with contextlib.suppress(UsageError):
            if memory_of(str(changed)).verdict(cluster.gpu.memory) == "fits":
                return {
                    "what": change,
                    "layout": str(changed),
                    "command": _command(str(changed), workload_args, cluster),
                }
    what = "bf16, recompute, smaller micro-batches and fsdp, where possible, are not enough"
    return {"what": f"{what}; give more GPUs or a smaller model"}


def _command(layout: str, workload_args: str, cluster: Cluster) -> str:
    if parse_layout(layout).axis is None:
        return f"everyrank train {workload_args} --layout {shlex.quote(layout)} --processes 1"
    nodes = cluster.gpus // cluster.per_node
    launch = f" --launcher slurm --nodes {nodes}" if nodes > 1 else ""
    return f"everyrank train {workload_args} --layout {shlex.quote(layout)}{launch} --processes {cluster.gpus}"
