"""A machine measured by `plan --calibrate`, and the seconds of a traced step on it. Imports no torch.

The time of an operator is read from a measured curve: products, convolutions and attention by their operations, other
kernels by their bytes, collectives by the bytes of their largest tensor. A step that is larger than the caches reads
from memory. Every step and every operator take additional `overhead` seconds of Python and dispatch, which differ by
strategy, because FSDP and DDP have different hooks.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from everyrank.errors import UsageError

__all__ = [
    "Machine",
    "OperatorLike",
    "Point",
    "pipeline_bubble",
    "read_machine",
    "seconds_at",
    "traced_seconds",
    "write_machine",
]

Point = tuple[float, float]
"""(Operations or bytes, seconds)."""


class OperatorLike(Protocol):
    """The fields of `trace.Operator` that are used here."""

    @property
    def name(self) -> str:
        """The name in torch."""
        ...

    @property
    def phase(self) -> str:
        """The phase of the step: input, activations (forward), or temporary (backward and optimizer)."""
        ...

    @property
    def flops(self) -> int:
        """The number of operations; 0 for kernels that are not products."""
        ...

    @property
    def bytes(self) -> int:
        """The bytes of its inputs and outputs."""
        ...

    @property
    def group(self) -> str:
        """The process group of a collective; empty for other operators."""
        ...

    @property
    def tensors(self) -> int:
        """The number of tensors that it makes or changes."""
        ...

    @property
    def is_strided(self) -> bool:
        """Whether an input is not contiguous along its last dimension."""
        ...

    @property
    def is_half(self) -> bool:
        """Whether its first input has 16-bit elements."""
        ...

    @property
    def is_causal(self) -> bool:
        """Whether it is causal attention, of which a GPU computes only half."""
        ...


_Curves = Mapping[str, Sequence[Point]]


@dataclass(frozen=True)
class Machine:
    """Measured curves.

    device    cpu, or the name of the GPU; ranks: number of ranks that computed at the same time; threads: of each rank
    cache     bytes of the last cache, which the ranks share; 0: cold curves are not used
    kernels   kind of kernel -> points, with operands in the caches; on a GPU also product_half and so on, of 16 bits;
              on a CPU also matrix: additional seconds of a product by its bytes
    cold      the same, with an operand from memory
    links     backend -> collective -> points
    overhead  backend -> strategy -> (seconds of a step, seconds of an operator) of Python and dispatch
    about     provenance: machine, versions and date
    factors   backend -> strategy -> measured seconds of two reference models over the sum of their parts
    """

    device: str
    ranks: int
    threads: int
    cache: float
    kernels: _Curves
    cold: _Curves
    links: Mapping[str, _Curves]
    overhead: Mapping[str, Mapping[str, tuple[float, float]]]
    about: Mapping[str, Any]
    factors: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Any])

    def kernel_seconds(self, operators: Iterable[OperatorLike], footprint: float = 0.0) -> float:
        """Return the seconds of all operators except collectives, without their overhead.

        `footprint` is the bytes that a rank uses in a step; the part that does not fit in the caches is read from
        memory.
        """
        share = self._share_from_memory(footprint)
        return sum(self._kernel(operator, share) for operator in operators if not operator.group)

    def link_seconds(self, operators: Iterable[OperatorLike], backend: str) -> float:
        """Return the seconds of all collectives. Raises `UsageError` for a backend that was not measured."""
        if backend not in self.links:
            raise UsageError(f"--backend {backend}: this calibration has {', '.join(self.links)}; calibrate again")
        return sum(self._link(operator, backend) for operator in operators if operator.group)

    def played_seconds(
        self, ranks: Sequence[Sequence[OperatorLike]], backend: str, of_operator: float, footprint: float = 0.0
    ) -> float:
        """Return the seconds until the last rank of a pipeline is done, with the waits for messages.

        A rank runs its operators one after the other. The n-th message that is received in a group is the n-th that is
        sent in it. It arrives when it is sent and the link has taken its time. `of_operator` seconds of dispatch are
        added to each operator. Raises `ValueError` if a rank waits for a message that is never sent.
        """
        share = self._share_from_memory(footprint)
        clocks, positions = [0.0] * len(ranks), [0] * len(ranks)
        arrivals: dict[str, list[float]] = {}
        received: Counter[str] = Counter()
        while any(position < len(operators) for position, operators in zip(positions, ranks, strict=True)):
            positions_before = list(positions)
            for rank, operators in enumerate(ranks):
                for operator in operators[positions[rank] :]:
                    clocks[rank] += of_operator
                    group = operator.group
                    if not group:
                        clocks[rank] += self._kernel(operator, share)
                    elif operator.name.startswith("send"):
                        arrivals.setdefault(group, []).append(clocks[rank] + self._link(operator, backend))
                    elif operator.name.startswith("recv"):
                        if received[group] == len(arrivals.get(group, ())):
                            clocks[rank] -= of_operator
                            break
                        clocks[rank] = max(clocks[rank], arrivals[group][received[group]])
                        received[group] += 1
                    else:
                        clocks[rank] += self._link(operator, backend)
                    positions[rank] += 1
            if positions == positions_before:
                raise ValueError("a rank waits for a message that is never sent")
        return max(clocks)

    def _share_from_memory(self, footprint: float) -> float:
        return min(1.0, footprint * self.ranks / self.cache) if self.cache else 0.0

    def _link(self, operator: OperatorLike, backend: str) -> float:
        kind = collective_kind(operator.name)
        return seconds_at(self.links[backend][kind], operator.bytes) if kind is not None else 0.0

    def _kernel(self, operator: OperatorLike, share: float) -> float:
        kind = kernel_kind(operator)
        count = max(operator.tensors, 1) if self.device == "cpu" else 1  # a GPU processes many tensors in one kernel
        if operator.is_half and f"{kind}_half" in self.kernels:
            kind = f"{kind}_half"
        amount = (operator.flops or operator.bytes) / count
        seconds, size = self._at(kind, amount, share), operator.bytes / count
        if kind == "product" and "matrix" in self.kernels:
            seconds += self._at("matrix", size, share)
        elif operator.flops:  # the time of a product of few rows depends on the bytes of its matrix
            seconds = max(seconds, self._at("other", size, share))
        return count * seconds

    def _at(self, kind: str, amount: float, share: float) -> float:
        return (1 - share) * seconds_at(self.kernels[kind], amount) + share * seconds_at(self.cold[kind], amount)


_EXPONENTIAL = re.compile(r"silu|gelu|sigmoid|tanh|exp|log|softmax|erf|mish|elu$|softplus")
_TRIGONOMETRIC = re.compile(r"^(sin|cos|tan|atan)")
_SUMS = re.compile(r"sum|mean|(?<!rms_)norm$|amax|argmax|^var|^std|^max|^min|pool")


def kernel_kind(operator: OperatorLike) -> str:
    """Return the curve of an operator."""
    name = operator.name
    backward = "_backward" if "backward" in name else ""
    if operator.flops:
        if "conv" in name:
            return f"convolution{backward}"
        return f"attention{backward}" if "scaled_dot" in name else "product"
    if re.search(r"batch_norm|layer_norm|group_norm", name):
        return f"normalisation{backward}"
    if operator.is_strided:
        return "strided"
    if _EXPONENTIAL.search(name):
        return "exponential"
    if _TRIGONOMETRIC.search(name):
        return "trigonometric"
    return "sum" if _SUMS.search(name) else "other"


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
    """Return the curve of a collective; None for a wait, and for the receiving half of a send."""
    return next((kind for word, kind in _COLLECTIVES.items() if word in name), None)


def seconds_at(points: Sequence[Point], size: float) -> float:
    """Return the seconds at `size`, by a line in logarithms; beyond the ends, at the rate of the last point."""
    if size <= points[0][0]:
        return points[0][1]
    for (low, first), (high, second) in itertools.pairwise(points):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return math.exp(math.log(first) + share * math.log(second / first))
    return points[-1][1] * size / points[-1][0]


def pipeline_bubble(stages: int, micro_batches: int, share: float = 1.0) -> float:
    """Return the idle fraction of a step of a pipeline.

    `share` is the idle time over that of 1f1b: 1/chunks of an interleaved schedule, 1/3 of zero-bubble.
    """
    idle = share * (stages - 1)
    return idle / (micro_batches + idle)


def traced_seconds(
    ranks: Sequence[Sequence[OperatorLike]], strategy: str, machine: Machine, backend: str, footprint: float = 0.0
) -> dict[str, float]:
    """Return the seconds of a step by part, of the rank that takes longest: kernels, links, overhead, waiting and rest.

    `waiting` is the time in which the last rank of a pipeline waits for messages. A step takes longer than its parts,
    by `rest`: caches are shared and ranks wait for each other. `ranks` are the operators of each rank, and `footprint`
    the bytes that a rank uses.
    """
    if backend not in machine.overhead or strategy not in machine.overhead[backend]:
        raise UsageError(f"{strategy} on {backend}: not measured in this calibration; run plan --calibrate again")
    parts: list[dict[str, float]] = []
    of_step, of_operator = machine.overhead[backend][strategy]
    messages = ("send", "recv") if strategy == "pipeline" else ()
    for operators in ranks:
        kernels, dispatch = machine.kernel_seconds(operators, footprint), of_operator * len(operators)
        if machine.device != "cpu":
            dispatch = max(dispatch - kernels, 0.0)  # a GPU computes while the host dispatches the next operators
        non_messages = [operator for operator in operators if not operator.name.startswith(messages)]
        links = machine.link_seconds(non_messages, backend) if machine.ranks > 1 else 0.0
        parts.append({"kernels": kernels, "links": links, "overhead": of_step + dispatch, "waiting": 0.0})
    longest = max(parts, key=lambda rank_parts: sum(rank_parts.values()))
    if messages:
        total = of_step + machine.played_seconds(ranks, backend, of_operator, footprint)
        longest["waiting"] = max(total - sum(longest.values()), 0.0)
    factor = machine.factors.get(backend, {}).get(strategy, 1.0)
    return longest | {"rest": (factor - 1) * sum(longest.values())}


def write_machine(machine: Machine) -> str:
    """Return the machine as JSON text, which `read_machine` reads."""
    return json.dumps({"machine": 2} | asdict(machine), indent=1, default=str) + "\n"


def read_machine(path: Path) -> Machine | None:
    """Return the machine in a file of `plan --calibrate`; None for a different file.

    Raises `UsageError` for an incomplete file.
    """
    try:
        read: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, dict) or "machine" not in read:
        return None
    if read["machine"] != 2:
        raise UsageError(f"{path}: the file is of an older version; write it again with plan --calibrate")
    try:
        links = {name: _curves(curves) for name, curves in read["links"].items()}
        overhead = {
            name: {strategy: (float(of_step), float(each)) for strategy, (of_step, each) in values.items()}
            for name, values in read["overhead"].items()
        }
        curves = _curves(read["kernels"]), _curves(read["cold"])
        sizes = int(read["ranks"]), int(read["threads"]), float(read["cache"])
        factors = {
            name: {strategy: float(factor) for strategy, factor in values.items()}
            for name, values in read.get("factors", {}).items()
        }
        return Machine(str(read["device"]), *sizes, *curves, links, overhead, read["about"], factors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{path}: the calibration is incomplete ({error}); write it again with plan --calibrate"
        ) from error


def _curves(read: Mapping[str, Any]) -> dict[str, list[Point]]:
    return {kind: _points(points) for kind, points in read.items()}


def _points(values: Any) -> list[Point]:
    points = sorted((float(size), float(seconds)) for size, seconds in values)
    if not points or not all(0 < size < 1e20 and 0 < seconds < 1e6 for size, seconds in points):
        raise ValueError("a curve without points above 0")
    return points
