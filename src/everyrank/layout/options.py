"""The options of strategies, in addition to those of all layouts: a dataclass for each mechanism.

The classes are frozen and inherit from `StrategyOptions`. The names of the fields are the keys of a layout, with their
defaults. An annotation is bool, int (at least 1), float (above 0), a Literal of words, `int | None` or `float | None`.
A strategy lists the options of its mechanisms (without repeated keys) and reads them with `layout.read(DDPOptions)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from everyrank.layout.layout import Layout

__all__ = [
    "BatchNormOptions",
    "BuildOptions",
    "CompressOptions",
    "ContextOptions",
    "CustomOptions",
    "DDPOptions",
    "DataParallelOptions",
    "DeviceOptions",
    "FSDPOptions",
    "HorovodOptions",
    "LocalSGDOptions",
    "ParameterServerOptions",
    "PipelineOptions",
    "StrategyOptions",
    "TensorOptions",
]


@dataclass(frozen=True)
class StrategyOptions:
    """The options of one mechanism."""

    def conflict(self, layout: Layout) -> str:
        """Return a message if these options conflict with `layout`, or ""."""
        del layout
        return ""

    def is_exact(self) -> bool:
        """Whether these options keep training equivalent to one device."""
        return True

    def repeatable(self) -> dict[str, object]:
        """Return keys and values that make training repeatable if timing decides something."""
        return {}


@dataclass(frozen=True)
class DDPOptions(StrategyOptions):
    """DistributedDataParallel.

    bucket_mb      size of a gradient bucket in MiB; None: the default of torch
    static_graph   every update uses the same parameters
    find_unused    some updates do not use all parameters
    """

    bucket_mb: float | None = None
    static_graph: bool = False
    find_unused: bool = False

    def conflict(self, layout: Layout) -> str:
        """Return a message for a static graph with accumulation."""
        if self.static_graph and layout.accumulate > 1:
            return (
                "torch learns a static graph while it sends gradients, and the first backward of several micro-batches "
                "sends none; leave out static_graph or accumulate"
            )
        return ""


@dataclass(frozen=True)
class BatchNormOptions(StrategyOptions):
    """The samples of batch norm statistics: the batch of all ranks, or the local samples of each rank."""

    batch_norm: Literal["sync", "local"] = "sync"

    def is_exact(self) -> bool:
        """Local statistics are not equivalent to those of the whole batch."""
        return self.batch_norm == "sync"

    def conflict(self, layout: Layout) -> str:
        """Ranks along these axes share their samples."""
        shared_axes = [axis for axis in ("context", "tensor") if layout.degrees.get(axis, 1) > 1]
        if shared_axes and not self.is_exact():
            return f"ranks along {shared_axes[0]} share their samples; leave out batch_norm=local, or {shared_axes[0]}"
        if layout.degrees.get("expert", 1) > 1 and not self.is_exact():
            return "batch_norm=local is not supported with an expert axis; leave one out"
        return ""


@dataclass(frozen=True)
class CompressOptions(StrategyOptions):
    """Gradient compression.

    compress      fp16 and bf16 round each element; powersgd sends a matrix as two narrow ones
    matrix_rank   columns of these matrices
    """

    compress: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    matrix_rank: int = 1

    def is_exact(self) -> bool:
        """Compressed gradients lose information."""
        return self.compress == "none"

    def conflict(self, layout: Layout) -> str:
        """Only gradients that each rank holds in full can be compressed."""
        split_axes = [axis for axis in ("context", "expert", "tensor") if layout.degrees.get(axis, 1) > 1]
        if split_axes and not self.is_exact():
            return f"compress={self.compress} is only for replicas; leave it out, or {split_axes[0]}"
        if "matrix_rank" in layout.options and self.compress != "powersgd":
            return "matrix_rank is for compress=powersgd"
        return ""


@dataclass(frozen=True)
class LocalSGDOptions(StrategyOptions):
    """Local SGD. `every`: updates of each rank between two averages."""

    every: int = 1

    def is_exact(self) -> bool:
        """Equivalent only with every=1 and plain SGD, and the optimizer is not known here."""
        return False

    def conflict(self, layout: Layout) -> str:
        """Some options need a decision by all ranks in every update."""
        if layout.precision == "fp16":
            return "ranks would skip different updates when their loss overflows; use precision=bf16"
        return ""


@dataclass(frozen=True)
class HorovodOptions(StrategyOptions):
    """Horovod's DistributedOptimizer. `compress`: the dtype in which gradients are sent and added up."""

    compress: Literal["none", "fp16"] = "none"

    def is_exact(self) -> bool:
        """Compressed gradients lose information."""
        return self.compress == "none"


@dataclass(frozen=True)
class FSDPOptions(StrategyOptions):
    """`fully_shard`.

    reshard_after_forward   free gathered blocks after forward, and gather them again in backward
    """

    reshard_after_forward: bool = True


@dataclass(frozen=True)
class BuildOptions(StrategyOptions):
    """How a split model is built.

    meta   no rank holds the whole model: each builds only shapes, and reads its parts from a file of rank 0
    """

    meta: bool = False

    def conflict(self, layout: Layout) -> str:
        """Replicas hold the whole model, so meta has no use."""
        if self.meta and layout.strategy == "ddp" and layout.degrees.get("tensor", 1) == 1:
            return "every rank of ddp holds the whole model; leave out meta, or give tensor=2, or fsdp:meta=true"
        return ""


@dataclass(frozen=True)
class TensorOptions(StrategyOptions):
    """Tensor parallelism. `sequence`: split activations between the matrices along the sequence."""

    sequence: bool = False

    def conflict(self, layout: Layout) -> str:
        """Only layouts with a tensor axis can use it."""
        return _needs_axis(layout, "sequence", "tensor")


@dataclass(frozen=True)
class ContextOptions(StrategyOptions):
    """Context parallelism. `method`: how attention exchanges keys and values between ranks."""

    method: Literal["ring", "ulysses"] = "ring"

    def conflict(self, layout: Layout) -> str:
        """Only layouts with a context axis can use it."""
        return _needs_axis(layout, "method", "context")


@dataclass(frozen=True)
class PipelineOptions(StrategyOptions):
    """Stages of blocks.

    schedule       the order of actions of the ranks
    microbatches   number of micro-batches in a schedule; None: twice the ranks of the pipeline
    chunks         stages on each rank, under schedule=interleaved
    """

    schedule: Literal["1f1b", "gpipe", "interleaved", "zero-bubble"] = "1f1b"
    microbatches: int | None = None
    chunks: int = 2

    def conflict(self, layout: Layout) -> str:
        """Some schedules do not support all options."""
        split_axes = [axis for axis in ("shard", "tensor") if layout.degrees.get(axis, 1) > 1]
        if self.schedule == "zero-bubble" and split_axes:
            return f"zero-bubble cannot delay the gradients of weights that {split_axes[0]} splits; use schedule=1f1b"
        if self.schedule == "zero-bubble" and layout.compile:
            return "torch.compile does not support delayed weight gradients; leave out compile, or use schedule=1f1b"
        if "chunks" in layout.options and self.schedule != "interleaved":
            return "chunks is for schedule=interleaved"
        return ""


@dataclass(frozen=True)
class ParameterServerOptions(StrategyOptions):
    """Servers and trainers.

    servers   number of ranks that hold the parameters; the other ranks train
    updates   sync: one for each global batch; async: one for each trainer's part of it, as it arrives
    order     for async: the order of arrival, or one drawn from the seed, which can be repeated
    """

    servers: int = 1
    updates: Literal["sync", "async"] = "sync"
    order: Literal["arrival", "seeded"] = "arrival"

    def is_exact(self) -> bool:
        """Asynchronous updates use stale gradients, which is a different algorithm."""
        return self.updates == "sync"

    def repeatable(self) -> dict[str, object]:
        """Draw the order of the trainers from the seed."""
        return {} if self.is_exact() else {"order": "seeded"}

    def conflict(self, layout: Layout) -> str:
        """Asynchronous updates and parameter servers do not support some options."""
        if layout.precision == "fp16":
            return "the loss scale of fp16 is not sent to the trainers; use precision=bf16"
        if "order" in layout.options and self.updates == "sync":
            return "order is for updates=async; a synchronous server adds up gradients in the order of ranks"
        return ""


@dataclass(frozen=True)
class DeviceOptions(StrategyOptions):
    """The number of devices of each rank, for models that are placed on several."""

    devices: int = 1


@dataclass(frozen=True)
class DataParallelOptions(StrategyOptions):
    """nn.DataParallel has no options, only conflicts."""

    def conflict(self, layout: Layout) -> str:
        """DataParallel copies the model in every step."""
        if layout.recompute:
            return "the copies of the model do not support recompute; use ddp"
        if layout.compile:
            return (
                "a compiled model keeps the weights of the first device, so all copies would use these; leave out "
                "compile, or use ddp:compile"
            )
        return ""


@dataclass(frozen=True)
class CustomOptions(StrategyOptions):
    """A custom `parallelize` has no options, only conflicts with what the function has to do itself."""

    def conflict(self, layout: Layout) -> str:
        """These settings belong in the function."""
        for key in ("recompute", "compile"):
            if getattr(layout, key):
                return f"a custom parallelize function has to do that itself; leave out {key}"
        if layout.precision not in ("float32", "float64"):
            return (
                f"a custom parallelize function chooses its own mixed precision; leave out precision={layout.precision}"
            )
        return ""


def _needs_axis(layout: Layout, key: str, axis: str) -> str:
    if key in layout.options and layout.axis != axis and layout.degrees.get(axis, 1) == 1:
        return f"{key} needs a {axis} axis; give for example {axis}=2"
    return ""
