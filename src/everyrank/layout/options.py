"""The options that a strategy has beside what is common to all layouts, a dataclass for each mechanism.

They are frozen and inherit `StrategyOptions`: the names of the fields are the keys, their defaults hold where a layout
leaves a key out, their annotations say what a value may be: bool, int (at least 1), float (above 0), a Literal of
words, or `int | None` and `float | None`. A strategy lists the options of the mechanisms that it composes (no key
twice) and reads them with `layout.read(DDPOptions)`.
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
    "DDPOptions",
    "DataParallelOptions",
    "DeviceOptions",
    "FSDPOptions",
    "HorovodOptions",
    "LocalSGDOptions",
    "OwnCodeOptions",
    "ParameterServerOptions",
    "PipelineOptions",
    "StrategyOptions",
    "TensorOptions",
]


@dataclass(frozen=True)
class StrategyOptions:
    """The options of one mechanism."""

    def conflict(self, layout: Layout) -> str:
        """What in `layout` these options do not go together with; nothing: an empty text."""
        del layout
        return ""

    def is_exact(self) -> bool:
        """Whether the mathematics stays that of one device, as far as these options go."""
        return True

    def repeatable(self) -> dict[str, object]:
        """Keys and values that make a training one that can be had again, where chance decides something of it."""
        return {}


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
class BatchNormOptions(StrategyOptions):
    """What batch norm takes its statistics over: the batch of all ranks, or each rank's own samples."""

    batch_norm: Literal["sync", "local"] = "sync"

    def is_exact(self) -> bool:
        """Statistics of a part of the batch are other numbers."""
        return self.batch_norm == "sync"

    def conflict(self, layout: Layout) -> str:
        """A rank along these axes has no samples of its own."""
        shared = [axis for axis in ("context", "tensor") if layout.degrees.get(axis, 1) > 1]
        if shared and not self.is_exact():
            return f"ranks along {shared[0]} share their samples; leave out batch_norm=local, or {shared[0]}"
        if layout.degrees.get("expert", 1) > 1 and not self.is_exact():
            return "batch_norm=local is compared with replicas, and ranks along expert are none; leave one out"
        return ""


@dataclass(frozen=True)
class CompressOptions(StrategyOptions):
    """What gradients are made smaller by before they travel.

    compress      fp16 and bf16 round each element; powersgd sends a matrix as two narrow ones
    matrix_rank   columns of these
    """

    compress: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    matrix_rank: int = 1

    def is_exact(self) -> bool:
        """What is left out of a gradient is not in the update."""
        return self.compress == "none"

    def conflict(self, layout: Layout) -> str:
        """What is compressed are gradients that each rank has whole."""
        shared = [axis for axis in ("context", "expert", "tensor") if layout.degrees.get(axis, 1) > 1]
        if shared and not self.is_exact():
            return f"compress={self.compress} is for replicas alone; leave it out, or {shared[0]}"
        if "matrix_rank" in layout.options and self.compress != "powersgd":
            return "matrix_rank is for compress=powersgd"
        return ""


@dataclass(frozen=True)
class LocalSGDOptions(StrategyOptions):
    """Local SGD. `every`: updates that each rank does by itself before the ranks average their parameters."""

    every: int = 1

    def is_exact(self) -> bool:
        """With every=1 and plain SGD it is, but that is not known here."""
        return False

    def conflict(self, layout: Layout) -> str:
        """What ranks must decide together in every update."""
        if layout.precision == "fp16":
            return "each rank would skip other updates than its peers as its loss overflows; use precision=bf16"
        return ""


@dataclass(frozen=True)
class HorovodOptions(StrategyOptions):
    """Horovod's DistributedOptimizer. `compress`: what gradients are sent and added up as."""

    compress: Literal["none", "fp16"] = "none"

    def is_exact(self) -> bool:
        """What is left out of a gradient is not in the update."""
        return self.compress == "none"


@dataclass(frozen=True)
class FSDPOptions(StrategyOptions):
    """`fully_shard`.

    reshard_after_forward   gathered blocks are let go of after forward, and gathered again in backward
    """

    reshard_after_forward: bool = True


@dataclass(frozen=True)
class BuildOptions(StrategyOptions):
    """How a model that is split comes to its ranks.

    meta   no rank ever holds all of it: each builds shapes alone, and gets its parts from a file of rank 0's
    """

    meta: bool = False

    def conflict(self, layout: Layout) -> str:
        """Replicas hold the whole model, whatever it is built on."""
        if self.meta and layout.strategy == "ddp" and layout.degrees.get("tensor", 1) == 1:
            return "every rank of ddp holds the whole model; leave out meta, or give tensor=2, or fsdp:meta=true"
        return ""


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
class ParameterServerOptions(StrategyOptions):
    """Servers and trainers.

    servers   ranks that hold the parameters; those that are left train
    updates   sync: one for each global batch; async: one for each trainer's part of it, as it comes in
    order     of async: as messages arrive, or drawn from the seed, so that it can be had again
    """

    servers: int = 1
    updates: Literal["sync", "async"] = "sync"
    order: Literal["arrival", "seeded"] = "arrival"

    def is_exact(self) -> bool:
        """Several updates for each global batch, of parameters that have changed meanwhile, are another training."""
        return self.updates == "sync"

    def repeatable(self) -> dict[str, object]:
        """Who comes first is drawn."""
        return {} if self.is_exact() else {"order": "seeded"}

    def conflict(self, layout: Layout) -> str:
        """Nobody waits for all gradients of an asynchronous update, and the loss scale would have to travel."""
        if layout.precision == "fp16":
            return "the loss scale of fp16 is not told to the trainers; use precision=bf16"
        if "order" in layout.options and self.updates == "sync":
            return "order is for updates=async; a synchronous server adds up gradients in the order of ranks"
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
