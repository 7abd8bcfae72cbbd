"""The events that the hooks write and the rules read: one class for each kind, with its fields.

A hook calls `recorder.write(Clip(line=where(), norm=norm, scale=scale))`. Each event becomes one line of JSON, with the
name of its class as `kind`. `Evidence.of(rank, Clip)` reads it back. Imports no torch.

A line of the script is "/path/train.py:12", or "" where no line of the user's own code is on the stack. A checksum is
a CRC-32, and is only compared with other checksums.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

__all__ = [
    "Altered",
    "Backward",
    "BackwardEnd",
    "BufferModule",
    "Clip",
    "CollectiveCall",
    "DiscardedGradients",
    "EvalForward",
    "EvalLoss",
    "EvalShare",
    "EvalSlice",
    "Event",
    "Fetch",
    "Forward",
    "ForwardEnd",
    "GroupOpened",
    "HookFailed",
    "LoaderBatch",
    "LoaderEpoch",
    "LocalTensor",
    "LossTerm",
    "NoSync",
    "Opaque",
    "OptimizerMade",
    "OptimizerStep",
    "PlateauStep",
    "ProcessEnd",
    "ProcessStart",
    "RandomDraw",
    "ReduceResult",
    "ReplayedUpdate",
    "RpcStarted",
    "Save",
    "ScheduleStep",
    "SeedSet",
    "Shuffle",
    "SourceFiles",
    "Stopped",
    "Unchecked",
    "Uninitialised",
    "Wrap",
    "event_from",
]

RandomDraw = tuple[str, int, int]
"""The line that draws random numbers, a checksum of the first of them, and the seed of their generator."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """What all events have; the recorder fills it in.

    rank    -1 before the process group is open
    update  optimizer steps before this event
    micro   backwards before it in this update
    count   number of the event in its process
    time    seconds since 1970
    """

    rank: int = -1
    update: int = 0
    micro: int = 0
    count: int = 0
    time: float = 0.0

    @classmethod
    def read(cls, values: dict[str, Any]) -> Self:
        """The event with these fields, as JSON has them."""
        return cls(**values)


@dataclasses.dataclass
class LossTerm:
    """A loss that a backward goes through.

    name       the function, such as "cross_entropy"
    terms      how many terms it is the mean or the sum of: ignored targets do not count, class weights do
    reduction  "mean" or "sum"
    nonzero    elements that are not zero, where it is a mean or a sum of a tensor
    value      NaN where it is of a subclass of Tensor
    scale      derivative of the backward's root by this loss; 0.0 if the backward does not go through it
    """

    name: str
    line: str
    terms: float
    reduction: str
    nonzero: int | None = None
    value: float = math.nan
    scale: float = 0.0


@dataclasses.dataclass(frozen=True)
class ReduceResult:
    """A number of an evaluation that all ranks send.

    numerator, denominator  where it is known to be a ratio
    is_exponential          it is an exponential, such as a perplexity
    """

    value: float
    numerator: float | None = None
    denominator: float | None = None
    is_exponential: bool = False


# --- the process


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessStart(Event):
    """Written when the hooks are in; `devices` counts pretended GPUs, `replay` the updates that are replayed."""

    pid: int
    sees_functions: bool
    devices: int
    replay: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessEnd(Event):
    """Written when the script has ended by itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stopped(Event):
    """Written when the audit ends the process because it has seen enough updates or epochs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceFiles(Event):
    """Written after the first update: the user's files that have been imported by then."""

    files: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupOpened(Event):
    """Written when the script has opened the process group, with the name of the backend, such as "gloo"."""

    backend: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RpcStarted(Event):
    """Written when the script initializes RPC, whose calls are not recorded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedSet(Event):
    """Written when the user's code seeds a generator: `library` is "torch", "numpy" or "random".

    lines  the user's lines on the stack, the innermost first
    """

    library: str
    lines: list[str]
    seed: int

    @property
    def line(self) -> str:
        """The innermost line of the user's own code."""
        return self.lines[0] if self.lines else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shuffle(Event):
    """Written when the user's code shuffles or chooses, before the first update.

    state  checksum of the state of its generator before it
    """

    line: str
    state: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Altered(Event):
    """Written when the script runs differently from how it is written; `message` is a line of the report."""

    message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unchecked(Event):
    """Written when something cannot be checked; `message` is a line of the report."""

    message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class HookFailed(Event):
    """Written for the first hook that raises in an update: this update and the next are not judged."""


# --- modules


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrap(Event):
    """Written when a model is given to DistributedDataParallel.

    num_batch_norms  BatchNorm1d to BatchNorm3d layers, which use only the local samples
    bucket_mb        None where the script does not set it
    numel            elements of all parameters
    """

    line: str
    num_batch_norms: int
    finds_unused: bool
    bucket_mb: float | None
    numel: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoSync(Event):
    """Written when DistributedDataParallel.no_sync is called."""

    line: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opaque(Event):
    """Written when gradients and parameters cannot be read, as under DeepSpeed; `message` explains it."""

    message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalTensor(Event):
    """Written once for each line with `to_local()` of a replicated DTensor that needs a gradient, without placements.

    The gradient of each rank's part is then taken for that of all.
    """

    line: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uninitialised(Event):
    """Written at a forward of a model with parameters that got no value after to_empty; six names of `num`."""

    line: str
    names: list[str]
    num: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward(Event):
    """Written before each forward of a whole model with trainable parameters.

    wrapper             the class of the wrapper, such as "DistributedDataParallel", or ""
    bypasses_wrapper    the model is wrapped, and called without its wrapper
    broadcasts_buffers  the wrapper broadcasts buffers before this forward
    row_checksums       a checksum for each of the first 64 samples of the input, in hexadecimal
    other_inputs        checksum of the other tensors among the arguments
    num_samples         first dimension of the first tensor
    generator           checksum of the state of torch's generator
    num_batch_norms     batch-norm layers of any class
    syncs               this backward is to reduce gradients: not inside no_sync
    noise               random draws of this step that go into the model
    """

    line: str
    wrapper: str
    bypasses_wrapper: bool
    broadcasts_buffers: bool
    is_grad: bool
    is_training: bool
    row_checksums: list[str]
    other_inputs: int
    num_samples: int
    generator: int
    num_batch_norms: int
    syncs: bool
    noise: list[RandomDraw]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardEnd(Event):
    """Written after a forward with gradients.

    num_dropouts  dropout masks drawn inside it
    noise         random draws inside it with a row for each sample
    drawn_at      lines of all random draws inside it
    output        checksum of a part of each tensor that it returns
    """

    num_dropouts: int
    noise: list[RandomDraw]
    drawn_at: list[str] = dataclasses.field(default_factory=list[str])
    output: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalForward(Event):
    """Written after a forward without gradients.

    is_prediction, is_lightning  called by predict, or by any loop, of Lightning
    buffers, parameters          checksums of all of them; `parameters` is 0 where they are sharded
    mode_at                      the line of the last `model.eval()`
    """

    line: str
    is_training: bool
    num_dropouts: int
    is_prediction: bool
    is_lightning: bool
    buffers: int
    parameters: int
    mode_at: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BufferModule(Event):
    """Written after a forward with gradients of a module that has buffers and no trainable parameters, as a loss.

    buffers  checksums by name of the floating-point buffers, without those of batch norms
    """

    line: str
    name: str
    buffers: dict[str, int]


# --- losses, gradients and steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backward(Event):
    """Written before each backward.

    gathered_at   the line of an all_gather without a backward whose result is in the loss, or ""
    is_detached   the features had been detached before they were gathered
    gathered_loss value of that loss; None where there is no such all_gather
    """

    line: str
    gathered_at: str = ""
    is_detached: bool = False
    gathered_loss: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardEnd(Event):
    """Written after each backward: the losses that it went through, and the lines that scale a loss."""

    losses: list[LossTerm]
    scaling_lines: list[str]

    @classmethod
    def read(cls, values: dict[str, Any]) -> Self:
        """The event with these fields, as JSON has them."""
        losses = [LossTerm(**term) for term in values["losses"]]
        return cls(**dict[str, Any](values, losses=losses))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clip(Event):
    """Written after torch clips gradients: the norm that it returns, and the loss scale of the gradients then."""

    line: str
    norm: float | None
    scale: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiscardedGradients(Event):
    """Written when zero_grad clears the gradients of so many backwards that no step has used."""

    line: str
    num_backwards: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerMade(Event):
    """Written when an optimizer is constructed."""

    line: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerStep(Event):
    """Written before each optimizer step.

    rates                learning rates, one for each parameter group
    waits                (function, line, count) of calls such as .item() since the last step
    backward_update      the update whose backwards gave the gradient
    checksums            of all parameters, by name; {} where some are sharded
    replicated           where some are sharded: checksums of those that each rank holds whole, by name; under FSDP1
                         of those that it ignores
    is_sharded           some parameters are DTensors
    is_split             some are sharded in another way than fully_shard does it
    shapes               checksum of all local shapes
    without_gradient     names of trainable parameters whose .grad is None, at most 20
    not_stepped          names of parameters with a gradient that this optimizer does not have, at most 20
    is_zero              all gradients are zero
    loss_scale           that of the gradient scaler
    zeroed_at            the line of the last zero_grad
    """

    line: str
    rates: list[float]
    waits: list[tuple[str, str, int]]
    backward_update: int
    checksums: dict[str, int]
    replicated: dict[str, int]
    is_sharded: bool
    is_split: bool
    shapes: int
    without_gradient: list[str]
    not_stepped: list[str]
    is_zero: bool
    loss_scale: float
    zeroed_at: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleStep(Event):
    """Written at each step of a learning-rate schedule, but for schedules that another schedule steps.

    schedule     number of the schedule in its process
    is_prepared  Accelerate steps it
    """

    line: str
    schedule: int
    name: str
    is_prepared: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlateauStep(Event):
    """Written when ReduceLROnPlateau is given a metric."""

    line: str
    value: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalLoss(Event):
    """Written for each mean loss of torch.nn.functional that is computed without gradients."""

    line: str
    value: float
    terms: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalShare(Event):
    """Written for each sum or mean of zeros and ones in an evaluation, such as of the right predictions of a batch.

    value  the share of ones
    terms  how many zeros and ones there are
    """

    line: str
    value: float
    terms: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSlice(Event):
    """Written for the first slice or mask of a tensor that each line takes in an evaluation."""


# --- data


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderEpoch(Event):
    """Written when an epoch of a DataLoader begins. Of a stream only the first group of fields is known.

    loader         number of the loader, the same on all ranks
    epoch          number of the epoch of this loader, from 0
    line           of the loader
    used_at        line of the loop
    made_at        lines of the sampler and of the Subset, or ""
    sampled_length length of the sampler's own dataset
    sampler_epoch  what set_epoch was last given
    workers        number of worker processes
    length         of the dataset
    lost_sampler   class and line of a sampler for the same dataset that was dropped before it was read; [] if none

    num_batches    of the whole epoch
    indices        of the samples, in order, at most 200,000; a sampler's keys that are no integers as text
    num_indices    of the whole epoch
    sizes          sizes of the batches, sorted, each once
    subset         checksum of the indices of a Subset
    seeded         hash of the first, the middle and the last sample, drawn under a fixed seed
    content        the same, where it does not depend on the seed
    samples        a checksum of each sample of `indices`, drawn under a fixed seed; [] if they are not known
    """

    loader: int
    epoch: int
    line: str
    used_at: str
    made_at: list[str]
    dataset: str
    sampler: str
    batch_sampler: str
    sampled_length: int | None
    sampler_epoch: int | None
    shuffles: bool | None
    workers: int
    length: int | None
    lost_sampler: list[str] = dataclasses.field(default_factory=list[str])
    num_batches: int | None = None
    indices: list[int | str] = dataclasses.field(default_factory=list[int | str])
    num_indices: int = 0
    sizes: list[int] = dataclasses.field(default_factory=list[int])
    subset: int | None = None
    seeded: str | None = None
    content: str | None = None
    samples: list[int] = dataclasses.field(default_factory=list[int])


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderBatch(Event):
    """Written when a DataLoader has given a batch.

    number         of the batch in its epoch, from 1
    seconds        that the script waited for it
    row_checksums  as in Forward
    is_after_jump  the last batch of an epoch that was shortened
    """

    loader: int
    epoch: int
    number: int
    seconds: float
    row_checksums: list[str]
    is_after_skip: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fetch(Event):
    """Written for the first two batches that a worker makes (-1: the rank itself makes them).

    before, after  checksums of the states of torch's, Python's and numpy's generator
    """

    number: int
    worker: int
    dataset: str
    before: list[int]
    after: list[int]


# --- communication and files


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveCall(Event):
    """Written for each collective, or message, that torch hands to its backend.

    op             such as "allreduce_" or "send"
    group          name of the process group
    shapes         dtype and shape of the first four tensors, such as "float32[3, 4]"
    num_bytes      of the first argument
    reduction      number of the ReduceOp as text: "0" for SUM, "1" for AVG
    strides        of tensors with several dimensions, where they are sent in the order of memory
    lines          the user's lines on the stack, the innermost first
    phase          "script", or whose collective it is, such as "backward at /path/train.py:12"
    library_calls  functions between the innermost of these lines and torch's backend
    value          the number that the script reduces itself, while there are gradients
    squares        sums of squares of the local gradients by parameter, at that moment
    result         the number, where it is one of an evaluation
    """

    op: str
    group: str
    shapes: list[str]
    num_bytes: int
    reduction: str
    strides: list[str]
    lines: list[str]
    phase: str
    library_calls: list[str]
    value: float | None = None
    squares: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    result: ReduceResult | None = None

    @property
    def line(self) -> str:
        """The innermost line of the user's own code."""
        return self.lines[0] if self.lines else ""

    @classmethod
    def read(cls, values: dict[str, Any]) -> Self:
        """The event with these fields, as JSON has them."""
        result = values["result"]
        return cls(**dict[str, Any](values, result=None if result is None else ReduceResult(**result)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Save(Event):
    """Written when torch or safetensors saves a file; `keys` are those of the saved dict, at most 100."""

    path: str
    line: str
    keys: list[str]


# --- replay


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayedUpdate(Event):
    """Written on rank 0 for each update that was replayed; the gradients are in a file of their own.

    number           of the update
    weights          weight of each backward, by "rank.micro"
    is_weighted      the weights are those of the mean over all terms; otherwise these are not known
    coupling         why the effect of batch norm could not be measured; "sends" where the model calls collectives
    without_dropout  dropout was left out when the effect of batch norm was measured
    sizes            samples of each backward
    """

    number: int
    weights: dict[str, float]
    is_weighted: bool
    coupling: str
    without_dropout: bool
    sizes: list[int]


_KINDS = {kind.__name__: kind for kind in Event.__subclasses__()}


def event_from(values: dict[str, Any]) -> Event:
    """The event that a line of JSON holds."""
    fields = dict(values)
    return _KINDS[fields.pop("kind")].read(fields)
