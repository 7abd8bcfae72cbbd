"""The strategies, one row each, and the options that a strategy has beside what is common to all layouts.

The options of a mechanism are a frozen dataclass that inherits `StrategyOptions`: the names of its fields are the keys,
their defaults hold where a layout leaves a key out, their annotations say what a value may be: bool, int (at least 1),
float (above 0), a Literal of words, or `int | None` and `float | None`. A strategy lists the options of the mechanisms
that it composes (no key twice) and reads them with `layout.read(DDPOptions)`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from everyrank.layout.layout import Layout

__all__ = [
    "AXES",
    "STRATEGIES",
    "ContextOptions",
    "DDPOptions",
    "DataParallelOptions",
    "DeviceOptions",
    "FSDPOptions",
    "OwnCodeOptions",
    "PipelineOptions",
    "Strategy",
    "StrategyOptions",
    "TensorOptions",
    "find_strategy",
    "problem_with",
]

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""Mesh axes, outermost first: ranks that are neighbours on the last axis are neighbours in number, too.

(An expert axis would stand between context and tensor.)
"""


@dataclass(frozen=True)
class StrategyOptions:
    """The options of one mechanism."""

    def conflict(self, layout: Layout) -> str:
        """What in `layout` these options do not go together with; nothing: an empty text."""
        del layout
        return ""


@dataclass(frozen=True)
class DDPOptions(StrategyOptions):
    """DistributedDataParallel.

    bucket_mb      size of a gradient bucket in MiB; None: torch's own
    static_graph   every update uses the same parameters
    find_unused    some updates leave parameters out
    """

    bucket_mb: float | None = None
    static_graph: bool = False
    find_unused: bool = False

    def conflict(self, layout: Layout) -> str:
        """Torch learns a static graph in the first backward that sends gradients."""
        if self.static_graph and layout.accumulate > 1:
            return (
                "torch learns a static graph while it sends gradients, and the first backward of several micro-batches "
                "sends none; leave out static_graph or accumulate"
            )
        return ""


@dataclass(frozen=True)
class FSDPOptions(StrategyOptions):
    """`fully_shard`.

    reshard_after_forward   gathered blocks are let go of after forward, and gathered again in backward
    meta                    build the model in full on rank 0's CPU alone
    """

    reshard_after_forward: bool = True
    meta: bool = False


@dataclass(frozen=True)
class TensorOptions(StrategyOptions):
    """Split matrices. `sequence`: activations between them are split along the sequence."""

    sequence: bool = False

    def conflict(self, layout: Layout) -> str:
        """Only a layout with a tensor axis has a use for it."""
        return _needs_axis(layout, "sequence", "tensor")


@dataclass(frozen=True)
class ContextOptions(StrategyOptions):
    """Split sequences. `method`: how attention reaches over the ranks."""

    method: Literal["ring", "ulysses"] = "ring"

    def conflict(self, layout: Layout) -> str:
        """Only a layout with a context axis has a use for it."""
        return _needs_axis(layout, "method", "context")


@dataclass(frozen=True)
class PipelineOptions(StrategyOptions):
    """Stages of blocks.

    schedule       which rank does what when
    microbatches   micro-batches that go through together; None: twice the ranks of the pipeline
    chunks         stages on each rank, under schedule=interleaved
    """

    schedule: Literal["1f1b", "gpipe", "interleaved", "zero-bubble"] = "1f1b"
    microbatches: int | None = None
    chunks: int = 2

    def conflict(self, layout: Layout) -> str:
        """What a schedule does not go together with."""
        split = [axis for axis in ("shard", "tensor") if layout.degrees.get(axis, 1) > 1]
        if self.schedule == "zero-bubble" and split:
            return f"gradients of weights that lie in parts ({split[0]}) cannot wait; use schedule=1f1b"
        if self.schedule == "zero-bubble" and layout.compile:
            return "the compiler does not know of weight gradients that wait; leave out compile, or use schedule=1f1b"
        if "chunks" in layout.options and self.schedule != "interleaved":
            return "chunks is for schedule=interleaved"
        return ""


@dataclass(frozen=True)
class DeviceOptions(StrategyOptions):
    """Devices of each rank, for models that lie on several."""

    devices: int = 1


@dataclass(frozen=True)
class DataParallelOptions(StrategyOptions):
    """nn.DataParallel has no options; what it does not go together with is said here."""

    def conflict(self, layout: Layout) -> str:
        """Its copies of the model are made anew in every step."""
        if layout.recompute:
            return "its copies of the model do not survive recompute; use ddp"
        if layout.compile:
            return (
                "what is compiled keeps the weights of the first device, and each copy of the model would answer with "
                "them; leave out compile, or use ddp:compile"
            )
        return ""


@dataclass(frozen=True)
class OwnCodeOptions(StrategyOptions):
    """A person's `parallelize` has no options here; what it does itself cannot be asked for a second time."""

    def conflict(self, layout: Layout) -> str:
        """What belongs into the function."""
        for key in ("recompute", "compile"):
            if getattr(layout, key):
                return f"own parallel code does that itself; leave out {key}, and do it in the function"
        if layout.precision not in ("float32", "float64"):
            return f"own parallel code chooses its mixed precision itself; leave out precision={layout.precision}"
        return ""


def _needs_axis(layout: Layout, key: str, axis: str) -> str:
    if key in layout.options and layout.axis != axis and layout.degrees.get(axis, 1) == 1:
        return f"{key} is for an axis that this layout has not; give {axis}=2, say"
    return ""


Kind = type | tuple[str, ...]
"""What a value may be: a type, or one of some words."""


@dataclass(frozen=True)
class Strategy:
    """One row of the table below.

    module      where its `prepare` is
    axis        the mesh axis that takes the ranks; None: it runs in one process, whatever the world
    options     those of the mechanisms that it composes
    also_axes   further mesh axes that it goes with
    any_axes    its mesh axes have names of a person's own
    """

    module: str
    axis: str | None
    options: tuple[type[Any], ...] = ()
    also_axes: tuple[str, ...] = ()
    any_axes: bool = False

    def kinds(self) -> Mapping[str, Kind]:
        """Key -> what its value may be, for all options of the strategy."""
        return {key: kind for options in self.options for key, kind in _kinds_of(options).items()}


@functools.cache  # every Layout that is made asks, and reading annotations is slow
def _kinds_of(options: type[Any]) -> Mapping[str, Kind]:
    hints = typing.get_type_hints(options)
    return {field.name: _kind(hints[field.name]) for field in dataclasses.fields(options)}


def _kind(annotation: Any) -> Kind:
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):  # X | None
        return typing.get_args(annotation)[0]
    return annotation


def problem_with(value: object, kind: Kind) -> str:
    """What is wrong with the value of a key; nothing: an empty text."""
    if isinstance(kind, tuple):
        return "" if value in kind else f"give one of {', '.join(kind)}"
    if kind is int and not (isinstance(value, int) and value >= 1):
        return "give at least 1"
    if kind is float and not (isinstance(value, int | float) and 0 < value < math.inf):
        return "give a number above 0"
    return ""


STRATEGIES: dict[str, Strategy] = {
    "single": Strategy("everyrank.strategies.single", None, (DeviceOptions,)),
    "dataparallel": Strategy("everyrank.strategies.dataparallel", None, (DataParallelOptions,)),
    "ddp": Strategy(
        "everyrank.strategies.ddp",
        "replicate",
        (DDPOptions, ContextOptions, TensorOptions, DeviceOptions),
        ("context", "tensor"),
    ),
    "zero1": Strategy("everyrank.strategies.zero1", "replicate", (DDPOptions,)),
    "fsdp": Strategy(
        "everyrank.strategies.fsdp",
        "shard",
        (FSDPOptions, ContextOptions, TensorOptions),
        ("replicate", "context", "tensor"),
    ),
    "tensor": Strategy("everyrank.strategies.tensor", "tensor", (TensorOptions,)),
    "context": Strategy("everyrank.strategies.context", "context", (ContextOptions, DDPOptions)),
    "pipeline": Strategy(
        "everyrank.strategies.pipeline", "pipeline", (PipelineOptions,), ("replicate", "shard", "tensor")
    ),
}
"""Deleting a strategy is removing its file and its row here (and options that no other row has)."""

_OWN_CODE = Strategy("everyrank.strategies.own", "data", (OwnCodeOptions,), any_axes=True)
"""The row of every `path/file.py[:name]`: the function there lays out the model (layout/contract.py)."""


def find_strategy(name: str) -> Strategy | None:
    """The row of a strategy: one of the table, or that of own parallel code for `path/file.py[:name]`."""
    return _OWN_CODE if ".py" in name else STRATEGIES.get(name)
