"""Seconds of a traced step on GPUs of a kind, without a measurement of that machine. Imports no torch.

A product takes 4 us and the larger of its operations (over 0.70 of the kind's peak) and its bytes (over 0.75 of its
memory bandwidth). Another kernel takes its bytes. Causal attention does half of the square. The host takes 1.1 ms for
an update and 21 us for each operator. Kernels run at the same time, so a phase (forward; backward and optimizer) takes
the longer of the two. Collectives of FSDP overlap with the work of their phase, all-reduces of gradients with 80% of
backward, and others do not overlap. Float32 products do not use tensor cores, which is torch's default.

The shares are the priors of step_time.py. The fits to published tables are not used, because they compensate for
kernels that the closed form leaves out, but a trace contains. The host's times are those that `plan --calibrate`
measured on the host of an H100 (benchmarks/gpu/machine-h100.json). Sources of links: those of step_time.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from everyrank.plan.hardware import Cluster, Gpu
from everyrank.plan.machine import OperatorLike, collective_kind
from everyrank.plan.step_time import PRIOR, collective_seconds

__all__ = ["StepLike", "roofline_parts", "roofline_seconds", "roofline_sums"]

_OF_STEP, _OF_OPERATOR = 1.1e-3, 21e-6  # seconds on the host
_RAMP = 4e-6  # seconds in which a product fills and drains the chip
_FORWARD = ("input", "activations")
_GATHERS = ("_allgather_base_", "_reduce_scatter_base_")  # as FSDP2 calls them
_OVERLAP_OF_BACKWARD = 0.8  # fraction of backward that overlaps with the reduction of gradients
_PHASES = ("forward", "backward")
_SUMS = (*(f"{phase} {name}" for phase in _PHASES for name in ("kernels", "dispatch", "gathers")), "reductions",
         "other links")  # fmt: skip
_RULES = {"all_reduce": "all_reduce", "reduce_scatter": "reduce_scatter"}  # others are treated as a gather


class StepLike(Protocol):
    """The fields of `pretend.TracedStep` that are used here."""

    @property
    def rank(self) -> int:
        """The rank that was traced."""
        ...

    @property
    def operators(self) -> Sequence[OperatorLike]:
        """The operators of an update."""
        ...

    @property
    def groups(self) -> Mapping[str, Sequence[int]]:
        """The ranks of each process group."""
        ...


def roofline_seconds(step: StepLike, strategy: str, cluster: Cluster, bubble: float = 0.0) -> dict[str, float]:
    """Return the seconds of an update of one rank by part: kernels, host, links and bubble.

    `host` is the time in which the GPU waits for Python. `bubble` is the idle share of a pipeline's step. The data
    loader is not included.
    """
    return roofline_parts(roofline_sums(step, strategy, cluster), bubble)


def roofline_sums(step: StepLike, strategy: str, cluster: Cluster) -> dict[str, float]:
    """Return seconds that grow in proportion to the blocks of a model: the sums before any of them overlap."""
    sums = dict.fromkeys(_SUMS, 0.0)
    for operator in step.operators:
        phase = "forward" if operator.phase in _FORWARD else "backward"
        if not operator.group:
            sums[f"{phase} kernels"] += _kernel(operator, cluster.gpu)
            sums[f"{phase} dispatch"] += _OF_OPERATOR
        elif (kind := collective_kind(operator.name)) is not None:
            seconds = _collective(kind, operator, step, cluster)
            if operator.name in _GATHERS and strategy != "tensor":
                sums[f"{phase} gathers"] += seconds
            elif kind == "all_reduce" and operator.name == "allreduce_" and strategy in ("ddp", "zero1", "fsdp"):
                sums["reductions"] += seconds
            else:
                sums["other links"] += seconds
    return sums


def roofline_parts(sums: Mapping[str, float], bubble: float = 0.0) -> dict[str, float]:
    """Return the seconds of an update by part, from those of `roofline_sums`."""
    kernels, dispatch, gathers = (
        {phase: sums[f"{phase} {name}"] for phase in _PHASES} for name in ("kernels", "dispatch", "gathers")
    )
    host = {phase: max(dispatch[phase] - kernels[phase], 0.0) for phase in _PHASES}
    busy = {phase: kernels[phase] + host[phase] for phase in _PHASES}
    exposed = sum(max(gathers[phase] - busy[phase], 0.0) for phase in _PHASES)
    left = _OVERLAP_OF_BACKWARD * max(busy["backward"] - gathers["backward"], 0.0)
    exposed += max(sums["reductions"] - left, 0.0)
    waiting = _OF_STEP + sum(host.values())
    parts = {"kernels": sum(kernels.values()), "host": waiting, "links": sums["other links"] + exposed}
    return parts | {"bubble": sum(parts.values()) * bubble / (1 - bubble)}


def _kernel(operator: OperatorLike, gpu: Gpu) -> float:
    moving = operator.bytes / (gpu.hbm * PRIOR.stream)
    if not operator.flops:
        return moving
    peak = gpu.flops if operator.is_half else gpu.flops_fp32
    if "scaled_dot" in operator.name:
        share = gpu.attention_efficiency if operator.is_half else PRIOR.matmul
        computing = operator.flops * (0.5 if operator.is_causal else 1.0) / (peak * share)
    else:
        computing = operator.flops / (peak * PRIOR.matmul)
    return _RAMP + max(computing, moving)


def _collective(kind: str, operator: OperatorLike, step: StepLike, cluster: Cluster) -> float:
    ranks = step.groups.get(operator.group) or range(cluster.gpus)
    node = step.rank // cluster.per_node
    in_node = sum(rank // cluster.per_node == node for rank in ranks)
    if kind == "send":
        link = cluster.inside if in_node == len(ranks) else cluster.across
        return float(link.latency + operator.bytes / link.bandwidth)
    rule = _RULES.get(kind, "all_gather")
    links = cluster.inside, cluster.across
    return float(collective_seconds(rule, operator.bytes, len(ranks), max(in_node, 1), *links))
