"""Custom parallelize functions, `parallelize(model, mesh) -> model`, and their contract.

    # my_parallel.py
    contract = ParallelContract(axes={"shard": "batch", "tensor": "same"})

    def parallelize(model, mesh):          # mesh: torch's DeviceMesh with these axes, outermost first
        parallelize_module(model.blocks, mesh["tensor"], {...})
        fully_shard(model, mesh=mesh["shard"])
        return model

Use it as a layout, `--layout my_parallel.py:tensor=2`: an axis without a size gets the remaining ranks.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyrank.errors import LayoutError
from everyrank.layout.layout import Layout
from everyrank.workload.find import import_file

__all__ = ["CustomParallelize", "ParallelContract", "find_custom_parallelize", "register_custom_parallelize", "zigzag"]

_READS = ("batch", "sequence", "same")
_USUAL_NAMES = {
    "batch": ("data", "dp", "ddp", "fsdp", "replicate", "shard", "dp_replicate", "dp_shard"),
    "sequence": ("context", "cp", "sequence"),
    "same": ("tensor", "tp"),
}
_OUR_AXES = {"batch": "replicate", "sequence": "context", "same": "tensor"}


@dataclass(frozen=True)
class ParallelContract:
    """Describes what the result of a `parallelize(model, mesh)` function does not show.

    Define it next to the function as `contract`, or on it as `parallelize.contract`. Without one, the axes are those of
    the layout and "data", and the gradient is a mean, as with DistributedDataParallel and `fully_shard`.

    Attributes:
        axes: Mesh axis -> what its ranks read, outermost first: "batch" (different samples), "sequence" (a part of the
            same sequences: contiguous, equal, along `Workload.sequence_dim`) or "same". Axes of "batch" come first,
            those of "same" last. None: the usual names have their usual meaning (data, dp, replicate, shard,
            dp_replicate, dp_shard; context, cp; tensor, tp).
        gradients: What `parameter.grad` is after backward, relative to the gradients of ranks with different samples or
            positions: "mean", "sum", or one for each axis, `{"context": "sum"}`.
        scale_loss: `(loss, mesh) -> loss` before backward. The loss is the sum of this rank's terms, shape ().
        after_backward: `(model, mesh) -> None`, called after the last backward of an update, for your own collectives.
        clip_grad_norm: `(model, max_norm, mesh) -> None`. Replaces everyrank's clipping if the workload has a
            clip_norm.
        gather: `(model, mesh) -> {name: whole tensor}`, called by all ranks: tensors of the original model, gathered
            from parts that no DTensor describes. Names and shapes are those of `model.state_dict()` before
            `parallelize`. Other tensors are taken as they are on the ranks.
        context: `(model, mesh, (input, target)) ->` a context manager around forward, loss and backward of each
            micro-batch, and around forward in evaluation: `loss_parallel()`, `context_parallel(mesh, ...)`.
        positions: Order of the positions over ranks that read parts of the same sequences: "contiguous"; "zigzag" (of
            2 n chunks, rank i has chunk i and chunk 2 n - 1 - i); or (length, ranks) -> all positions, rank by rank.
        cut_by_context: Every rank reads whole sequences, and `context` takes its part, as torch's `context_parallel`.

    Raises:
        LayoutError: A value is none of these.

    Examples:
        >>> from everyrank import ParallelContract
        >>> contract = ParallelContract(axes={"context": "sequence"}, positions="zigzag")
        >>> contract.reads("context")
        'sequence'
    """

    axes: Mapping[str, str] | None = None
    gradients: str | Mapping[str, str] = "mean"
    scale_loss: Callable[[Any, Any], Any] | None = None
    after_backward: Callable[[Any, Any], None] | None = None
    clip_grad_norm: Callable[[Any, float, Any], Any] | None = None
    gather: Callable[[Any, Any], Mapping[str, Any]] | None = None
    context: Callable[[Any, Any, Any], contextlib.AbstractContextManager[Any]] | None = None
    positions: str | Callable[[int, int], Sequence[int]] = "contiguous"
    cut_by_context: bool = False

    def __post_init__(self) -> None:
        axes = self.axes or {}
        for axis, reads in axes.items():
            if reads not in _READS:
                raise LayoutError(f"contract: axes={{{axis!r}: {reads!r}}}: give one of {', '.join(_READS)}")
        order = [_READS.index(reads) for reads in axes.values()]
        if order != sorted(order):
            raise LayoutError(
                f"contract: axes {', '.join(axes)}: give the axes of batch first, then those of sequence, then "
                "those of same"
            )
        reductions = self.gradients if isinstance(self.gradients, Mapping) else {"": self.gradients}
        for axis, reduction in reductions.items():
            if reduction not in ("mean", "sum"):
                raise LayoutError(f"contract: gradients={reduction!r}: give mean or sum")
            if axis and not self.reads(axis):
                names = axes if self.axes is not None else (name for names in _USUAL_NAMES.values() for name in names)
                raise LayoutError(f"contract: gradients of {axis}: no such axis; it has {', '.join(names)}")
        if not callable(self.positions) and self.positions not in ("contiguous", "zigzag"):
            raise LayoutError(
                f"contract: positions={self.positions!r}: give contiguous, zigzag, or (length, ranks) -> positions"
            )
        if self.cut_by_context and self.context is None:
            raise LayoutError("contract: cut_by_context=True needs a context that cuts the sequences")

    def order_of_positions(self) -> Callable[[int, int], Sequence[int]] | None:
        """Return (length, ranks) -> all positions of a sequence, those of the first rank first; None for contiguous."""
        if callable(self.positions):
            return self.positions
        return zigzag if self.positions == "zigzag" else None

    def around(self, model: Any, mesh: Any, micro_batch: Any) -> contextlib.AbstractContextManager[Any]:
        """Return the user's context around a micro-batch; `micro_batch` is the part that this rank has."""
        if self.context is None:
            return contextlib.nullcontext()
        return self.context(model, mesh, (micro_batch.input, micro_batch.target))

    def gradient_over(self, axis: str) -> str:
        """Whether `parameter.grad` is the mean or the sum over this axis."""
        return self.gradients if isinstance(self.gradients, str) else self.gradients.get(axis, "mean")

    def reads(self, axis: str) -> str:
        """Return what the ranks along an axis read: batch, sequence or same; "" for an unknown axis."""
        if self.axes is not None:
            return self.axes.get(axis, "")
        return next((reads for reads, names in _USUAL_NAMES.items() if axis in names), "")


def zigzag(length: int, ranks: int) -> list[int]:
    """Return positions that balance a causal sequence over the ranks: chunks 0, 2n-1, 1, 2n-2, ...

    `zigzag(8, 2)` is [0, 1, 6, 7, 2, 3, 4, 5]: rank 0 has the first and the last chunk. Raises `LayoutError` for a
    length that does not divide into two chunks for each rank.
    """
    if length % (2 * ranks):
        raise LayoutError(
            f"contract: positions=zigzag: a sequence of {length} does not divide into {2 * ranks} chunks, two for each "
            "of the ranks; pad it to a multiple"
        )
    size = length // (2 * ranks)
    chunks = [chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank)]
    return [position for chunk in chunks for position in range(chunk * size, (chunk + 1) * size)]


@dataclass(frozen=True)
class CustomParallelize:
    """A `parallelize` function with its contract and the mesh it gets.

    path    its name in messages: `my_parallel.py:parallelize`; `axes` maps axis -> ranks along it, outermost first
    """

    path: str
    function: Callable[[Any, Any], Any]
    contract: ParallelContract
    axes: Mapping[str, int]

    def sizes(self) -> dict[str, int]:
        """Return the number of ranks on everyrank's axes: replicate, context and tensor."""
        return {
            ours: math.prod(size for axis, size in self.axes.items() if self.contract.reads(axis) == reads)
            for reads, ours in _OUR_AXES.items()
        }

    def num_averaged(self) -> int:
        """Return the number of ranks over which the gradient is a mean according to the contract."""
        data_axes = {axis: size for axis, size in self.axes.items() if self.contract.reads(axis) != "same"}
        return math.prod(size for axis, size in data_axes.items() if self.contract.gradient_over(axis) == "mean")


_registered: dict[str, tuple[Callable[..., Any], ParallelContract | None]] = {}


def register_custom_parallelize(path: str, function: Callable[..., Any], contract: ParallelContract | None) -> None:
    """Use this function for the layout `path` in this process, instead of one from a file."""
    _registered[path] = function, contract


def find_custom_parallelize(layout: Layout, world_size: int) -> CustomParallelize:
    """Import the function of a layout in this process, with its mesh.

    Raises `LayoutError` for a missing function, unknown axes, and sizes that do not multiply to `world_size`;
    `WorkloadError` for a file that raises.
    """
    if layout.strategy in _registered:
        function, contract = _registered[layout.strategy]
        display_name = layout.strategy
    else:
        path, _, name = layout.strategy.rpartition(":") if ".py:" in layout.strategy else (layout.strategy, "", "")
        name = name or "parallelize"
        display_name = f"{Path(path).name}:{name}"
        module = import_file(Path(path).absolute())
        function, contract = getattr(module, name, None), getattr(module, "contract", None)
        if not callable(function):
            raise LayoutError(
                f"layout {layout.strategy}: {Path(path).name} has no function {name}{_suggest_functions(module)}"
            )
    contract = getattr(function, "contract", contract)
    if contract is not None and not isinstance(contract, ParallelContract):
        raise LayoutError(
            f"{display_name}: its contract is {type(contract).__name__}; give an everyrank.ParallelContract"
        )
    contract = contract or ParallelContract()
    return CustomParallelize(display_name, function, contract, _axes(layout, contract, world_size))


def _suggest_functions(module: Any) -> str:
    """Return the functions of a file that the user may have meant, for an error message."""
    names = [name for name, value in vars(module).items() if inspect.isfunction(value) and _takes_two_arguments(value)]
    return f"; it has {', '.join(names)}: write {Path(module.__file__).name}:{names[0]}" if names else ""


def _takes_two_arguments(function: Any) -> bool:
    required = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
    ]
    return len(required) == 2


def _axes(layout: Layout, contract: ParallelContract, world_size: int) -> dict[str, int]:
    """Return the ranks along each axis, outermost first; the one axis without a size takes the remaining ranks."""
    known: Sequence[str] = list(contract.axes) if contract.axes is not None else _usual_axes(layout)
    for axis in layout.degrees:
        if not contract.reads(axis):
            if contract.axes is None:
                fix = f"declare what its ranks read: contract = ParallelContract(axes={{{axis!r}: 'batch'}})"
            else:
                fix = f"it has {', '.join(known)}"
            raise LayoutError(f"layout {layout.strategy}: the contract has no mesh axis {axis}; {fix}")
    open_axes = [axis for axis in known if axis not in layout.degrees]
    if len(open_axes) > 1:
        example = ",".join(f"{axis}=1" for axis in open_axes[1:])
        raise LayoutError(
            f"layout {layout.strategy}: {' and '.join(open_axes)} have no size; give all but one, for example {example}"
        )
    fixed = math.prod(layout.degrees.values())
    sizes = {axis: layout.degrees.get(axis, max(1, world_size // fixed)) for axis in known}
    if math.prod(sizes.values()) != world_size:
        shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        product = math.prod(sizes.values())
        raise LayoutError(
            f"layout {layout.strategy}: {shown} = {product}, but there are {world_size} processes; "
            f"give --processes {product}"
        )
    return sizes


def _usual_axes(layout: Layout) -> list[str]:
    """Return the axes of a layout without a contract: those it names, in the order batch, sequence, same; and data."""
    contract = ParallelContract()
    named = [axis for reads in _READS for axis in layout.degrees if contract.reads(axis) == reads]
    has_data = any(contract.reads(axis) == "batch" for axis in named)
    return named if has_data else ["data", *named]
