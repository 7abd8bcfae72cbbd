"""A machine as `plan --calibrate` has measured it, and the seconds of a traced step on it. Imports no torch.

The time of an operator is read from a measured curve: products, convolutions and attention by their operations, other
kernels by their bytes, collectives by the bytes of their largest tensor. Every operator takes `overhead` seconds of
Python and dispatch besides, which differ by strategy: FSDP's hooks are not DDP's.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from everyrank.errors import UsageError

__all__ = ["Machine", "OperatorLike", "Point", "read_machine", "traced_seconds", "write_machine"]

Point = tuple[float, float]
"""(Operations or bytes, seconds)."""


class OperatorLike(Protocol):
    """What is read of `trace.Operator`."""

    @property
    def name(self) -> str:
        """As torch calls it."""
        ...

    @property
    def flops(self) -> int:
        """Operations; 0 for kernels that are no products."""
        ...

    @property
    def bytes(self) -> int:
        """Of its inputs and outputs."""
        ...

    @property
    def group(self) -> str:
        """Of a collective; empty for others."""
        ...


@dataclass(frozen=True)
class Machine:
    """Measured curves.

    device    cpu, or the name of the GPU; ranks, threads: that computed at the same time, and of each
    kernels   kind of kernel -> points
    links     backend -> collective -> points
    overhead  backend -> strategy -> seconds for each operator
    about     provenance: machine, versions and date
    """

    device: str
    ranks: int
    threads: int
    kernels: Mapping[str, Sequence[Point]]
    links: Mapping[str, Mapping[str, Sequence[Point]]]
    overhead: Mapping[str, Mapping[str, float]]
    about: Mapping[str, Any]

    def kernel_seconds(self, operators: Iterable[OperatorLike]) -> float:
        """Return the seconds of all operators that are no collectives, without their overhead."""
        return sum(self._kernel(operator) for operator in operators if not operator.group)

    def link_seconds(self, operators: Iterable[OperatorLike], backend: str) -> float:
        """Return the seconds of all collectives. Raises `UsageError` for a backend that was not measured."""
        if backend not in self.links:
            raise UsageError(f"--backend {backend}: this calibration has {', '.join(self.links)}; calibrate again")
        return sum(
            _at(self.links[backend][kind], operator.bytes)
            for operator in operators
            if operator.group and (kind := collective_kind(operator.name)) is not None
        )

    def _kernel(self, operator: OperatorLike) -> float:
        kind = kernel_kind(operator.name) if operator.flops else "other"
        return _at(self.kernels[kind], operator.flops or operator.bytes)


def kernel_kind(name: str) -> str:
    """Return the curve of an operator with operations."""
    if "conv" in name:
        return "convolution_backward" if "backward" in name else "convolution"
    if "scaled_dot" in name:
        return "attention_backward" if "backward" in name else "attention"
    return "product"


_COLLECTIVES = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "broadcast": "broadcast",
    "alltoall": "all_gather",
    "all_to_all": "all_gather",
    "send": "send",
}


def collective_kind(name: str) -> str | None:
    """Return the curve of a collective; None for waiting, and for the other half of a send."""
    return next((kind for word, kind in _COLLECTIVES.items() if word in name), None)


def _at(points: Sequence[Point], size: float) -> float:
    """Return the seconds at `size`, by a line in logarithms; beyond the ends, at the rate of the last point."""
    if size <= points[0][0]:
        return points[0][1]
    for (low, first), (high, second) in itertools.pairwise(points):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return math.exp(math.log(first) + share * math.log(second / first))
    return points[-1][1] * size / points[-1][0]


def traced_seconds(
    ranks: Sequence[Sequence[OperatorLike]],
    strategy: str,
    machine: Machine,
    backend: str,
    bubble: float = 0.0,
) -> dict[str, float]:
    """Return the seconds of a step by part: kernels, links, overhead and bubble, of the rank that takes longest.

    `ranks` are the operators of each rank, `bubble` the idle share of a pipeline's step.
    """
    if backend not in machine.overhead or strategy not in machine.overhead[backend]:
        raise UsageError(f"{strategy} on {backend}: not in this calibration; run plan --calibrate again")
    parts: list[dict[str, float]] = []
    for operators in ranks:
        one = {
            "kernels": machine.kernel_seconds(operators),
            "links": machine.link_seconds(operators, backend),
            "overhead": machine.overhead[backend][strategy] * len(operators),
        }
        parts.append(one | {"bubble": sum(one.values()) * bubble / (1 - bubble)})
    return max(parts, key=lambda one: sum(one.values()))


def write_machine(machine: Machine) -> str:
    """Return the machine as JSON text, which `read_machine` reads."""
    return json.dumps({"machine": 1} | asdict(machine), indent=1, default=str) + "\n"


def read_machine(path: Path) -> Machine | None:
    """Return the machine of a file of `plan --calibrate`; None for another file.

    Raises `UsageError` for one that is not whole.
    """
    try:
        read: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, dict) or "machine" not in read:
        return None
    try:
        kernels = {kind: _points(points) for kind, points in read["kernels"].items()}
        links = {
            name: {kind: _points(points) for kind, points in curves.items()} for name, curves in read["links"].items()
        }
        overhead = {
            name: {strategy: float(value) for strategy, value in values.items()}
            for name, values in read["overhead"].items()
        }
        return Machine(
            str(read["device"]), int(read["ranks"]), int(read["threads"]), kernels, links, overhead, read["about"]
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path}: no whole calibration ({error}); write it again with plan --calibrate") from error


def _points(values: Any) -> list[Point]:
    points = sorted((float(size), float(seconds)) for size, seconds in values)
    if not points or not all(0 < size < 1e20 and 0 < seconds < 1e6 for size, seconds in points):
        raise ValueError("a curve without points above 0")
    return points
