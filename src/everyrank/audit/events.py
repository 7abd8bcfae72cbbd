"""The events that the hooks write and the rules read, with one class for each kind.

A hook calls `recorder.write(Clip(line=user_line(), norm=norm, scale=scale))`. Each event becomes one line of JSON, with
the name of its class as `kind`. `Evidence.of(rank, Clip)` reads it back. Does not import torch.

A line of the script is "/path/train.py:12", or "" if no line of the user's own code is on the stack. A checksum is a
CRC-32, and is only compared with other checksums.
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
    "FrozenModule",
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
    """The fields of all events. The recorder sets them.

    rank    -1 before the process group is initialized
    update  number of optimizer steps before this event
    micro   number of backwards before it in this update
    count   position of the event in its process
    time    seconds since 1970
    """

    rank: int = -1
    update: int = 0
    micro: int = 0
    count: int = 0
    time: float = 0.0

    @classmethod
    def read(cls, values: dict[str, Any]) -> Self:
        """Return the event with these fields from JSON."""
        return cls(**values)


@dataclasses.dataclass
class LossTerm:
    """A loss in the graph of a backward.

    name       the function, such as "cross_entropy"
    terms      number of terms that it averages or sums, without ignored targets and weighted by class weights
    reduction  "mean" or "sum"
    nonzero    number of nonzero elements if it is a mean or a sum of a tensor
    value      the value of the loss; NaN for a subclass of Tensor
    scale      derivative of the backward's root with respect to this loss; 0.0 if the backward does not reach it
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
    """A number that all ranks reduce in an evaluation.

    numerator, denominator  known if the number is a ratio
    factor                  Python number by which the ratio was multiplied, such as 100 for percent
    is_exponential          whether it is an exponential, such as a perplexity
    """

    value: float
    numerator: float | None = None
    denominator: float | None = None
    factor: float = 1.0
    is_exponential: bool = False


# --- the process


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessStart(Event):
    """Written when the hooks are installed. `devices` counts pretended GPUs, and `replay` the updates to replay."""

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
    """Written after the first update, with the user's files that have been imported by then."""

    files: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupOpened(Event):
    """Written when the script has initialized the process group, with the name of the backend, such as "gloo"."""

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
    """Written if the run differs from the script as it is written. `message` is a line of the report."""

    message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unchecked(Event):
    """Written if something cannot be checked. `message` is a line of the report."""

    message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class HookFailed(Event):
    """Written for the first hook that raises an error in an update. This update and the next are not judged."""


# --- modules


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrap(Event):
    """Written when a model is given to DistributedDataParallel.

    num_batch_norms  number of BatchNorm1d to BatchNorm3d layers, which use only local samples
    bucket_mb        None if the script does not set it
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
    """Written if gradients and parameters cannot be read, for example under DeepSpeed. `message` explains why."""

    message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalTensor(Event):
    """Written once for each line with `to_local()` of a replicated DTensor that needs a gradient, without placements.

    Then each rank takes the gradient of its own samples as the gradient of all samples.
    """

    line: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uninitialised(Event):
    """Written at a forward of a model with `num` parameters that got no value after to_empty, with up to six names."""

    line: str
    names: list[str]
    num: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward(Event):
    """Written before each forward of a whole model with trainable parameters.

    wrapper             the class of the wrapper, such as "DistributedDataParallel", or ""
    bypasses_wrapper    whether the model is wrapped, but called without its wrapper
    broadcasts_buffers  whether the wrapper broadcasts buffers before this forward
    row_checksums       checksums of the first 64 samples of the input, in hexadecimal
    other_inputs        checksum of all other tensors among the arguments
    num_samples         size of the first dimension of the first tensor
    generator           checksum of the state of torch's generator
    num_batch_norms     number of batch-norm layers of any class
    syncs               whether the backward will reduce gradients, because it is not inside no_sync
    noise               random draws of this step that are inputs of the model
    is_in_closure       whether a closure of the optimizer's step calls the model, as for LBFGS
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
    is_in_closure: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardEnd(Event):
    """Written after a forward with gradients.

    num_dropouts  number of dropout masks drawn in the forward
    noise         random draws in the forward that have a row for each sample
    drawn_at      lines of all random draws in the forward
    output        checksum of some elements of each returned tensor
    """

    num_dropouts: int
    noise: list[RandomDraw]
    drawn_at: list[str] = dataclasses.field(default_factory=list[str])
    output: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalForward(Event):
    """Written after a forward without gradients.

    is_prediction, is_lightning  whether Lightning's predict loop, or any of its loops, calls it
    buffers, parameters          checksums of all buffers and parameters; `parameters` is 0 if some are sharded
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
    """Written after a forward with gradients of a module, such as a loss, with buffers and no trainable parameters.

    buffers  checksums of the floating-point buffers by name, without those of batch norms
    """

    line: str
    name: str
    buffers: dict[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenModule(Event):
    """Written before the first call of a module without trainable parameters, if it comes before the first update.

    It is written again before the first call without gradients after an update, because the script may have changed it.

    tensors  checksums by name of its floating-point parameters and, before the first update, buffers
    """

    line: str
    name: str
    tensors: dict[str, int]


# --- losses, gradients and steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backward(Event):
    """Written before each backward.

    gathered_at   the line of an all_gather without a backward whose result goes into the loss, or ""
    is_detached   whether the features had been detached before they were gathered
    gathered_loss value of that loss; None without such an all_gather
    """

    line: str
    gathered_at: str = ""
    is_detached: bool = False
    gathered_loss: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardEnd(Event):
    """Written after each backward, with the losses in its graph and the lines that scale a loss."""

    losses: list[LossTerm]
    scaling_lines: list[str]

    @classmethod
    def read(cls, values: dict[str, Any]) -> Self:
        """The event with these fields, as JSON has them."""
        losses = [LossTerm(**term) for term in values["losses"]]
        return cls(**dict[str, Any](values, losses=losses))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clip(Event):
    """Written after torch clips gradients, with the norm that it returns and the loss scale of the gradients."""

    line: str
    norm: float | None
    scale: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiscardedGradients(Event):
    """Written when zero_grad clears the gradients of `num_backwards` backwards that no step has used."""

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
    backward_update      the update whose backwards computed the gradient
    checksums            checksums of all parameters by name; {} if some are sharded
    replicated           if some are sharded: checksums of the replicated parameters by name; under FSDP1 those of the
                         parameters that it ignores
    is_sharded           whether some parameters are DTensors
    is_split             whether some are sharded in a different way from fully_shard
    shapes               checksum of all local shapes
    without_gradient     names of trainable parameters whose .grad is None, at most 20
    not_stepped          names of parameters with a gradient that this optimizer does not have, at most 20
    is_zero              whether all gradients are zero
    loss_scale           the scale of the gradient scaler
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
    """Written at each step of a learning-rate schedule, except for schedules that another schedule steps.

    schedule     id of the schedule in its process
    is_prepared  whether Accelerate steps it
    """

    line: str
    schedule: int
    name: str
    is_prepared: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlateauStep(Event):
    """Written when ReduceLROnPlateau gets a metric.

    schedule     id of the schedule in its process
    is_prepared  whether Accelerate steps it
    """

    line: str
    value: float
    schedule: int
    is_prepared: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalLoss(Event):
    """Written for each mean loss of torch.nn.functional that is computed without gradients."""

    line: str
    value: float
    terms: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalShare(Event):
    """Written for each sum or mean of zeros and ones in an evaluation, for example of correct predictions.

    value  the share of ones
    terms  the number of zeros and ones
    """

    line: str
    value: float
    terms: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSlice(Event):
    """Written once for each line that takes a slice or a mask of rows in an evaluation."""


# --- data


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderEpoch(Event):
    """Written when an epoch of a DataLoader begins. For a stream only the first group of fields is known.

    loader         number of the loader, the same on all ranks
    epoch          number of the epoch of this loader, from 0
    line           the line that constructs the loader
    used_at        the line of the loop
    made_at        lines that construct the sampler and the Subset, or ""
    sampled_length length of the sampler's own dataset
    sampler_epoch  the last argument of set_epoch
    workers        number of worker processes
    length         length of the dataset
    lost_sampler   class and line of a sampler for the same dataset that was replaced before it was read; [] if none

    num_batches    number of batches of the whole epoch
    indices        indices of the samples in order, at most 200,000; keys that are not integers as text
    num_indices    number of indices of the whole epoch
    sizes          distinct sizes of the batches, sorted
    subset         checksum of the indices of a Subset
    seeded         hash of the first, the middle and the last sample, read with a fixed seed
    content        the same hash if it does not depend on the seed
    samples        a checksum of each sample of `indices`, read with a fixed seed; [] if they are not known
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
    """Written when a DataLoader has yielded a batch.

    number         number of the batch in its epoch, from 1
    seconds        how long the script waited for the batch
    row_checksums  checksums of its samples, as in Forward
    is_after_skip  whether it is the last batch of a shortened epoch, after batches that were skipped
    """

    loader: int
    epoch: int
    number: int
    seconds: float
    row_checksums: list[str]
    is_after_skip: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fetch(Event):
    """Written for the first two batches that a worker makes; worker -1 is the process of the rank.

    before, after  checksums of the states of torch's, Python's and numpy's generators
    """

    number: int
    worker: int
    dataset: str
    before: list[int]
    after: list[int]


# --- communication and files


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveCall(Event):
    """Written for each collective or point-to-point operation that torch passes to its backend.

    op             name of the operation, such as "allreduce_" or "send"
    group          name of the process group
    shapes         dtype and shape of the first four tensors, such as "float32[3, 4]"
    num_bytes      size of the first argument
    reduction      number of the ReduceOp as text: "0" for SUM, "1" for AVG
    strides        strides of tensors with several dimensions, if the operation sends them in memory order
    lines          the user's lines on the stack, the innermost first
    phase          "script", or the code that calls the collective, such as "backward at /path/train.py:12"
    library_calls  functions between the innermost of these lines and torch's backend
    value          the number that the script reduces, if there are gradients
    squares        sums of squares of the local gradients at that moment, by parameter
    result         the number that the script reduces in an evaluation
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
    """Written when torch or safetensors saves a file. `keys` has at most 100 keys of the saved dict."""

    path: str
    line: str
    keys: list[str]


# --- replay


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayedUpdate(Event):
    """Written on rank 0 for each update that was replayed. Its gradients are in a separate file.

    number              number of the update
    weights             weight of each backward, by "rank.micro"
    has_term_weights    whether the weights are those of the mean over all terms; otherwise these are not known
    batch_norm_failure  why the effect of batch norm could not be measured; "sends" if the model calls collectives
    without_dropout     whether dropout was disabled to measure the effect of batch norm
    sizes               number of samples of each backward
    """

    number: int
    weights: dict[str, float]
    has_term_weights: bool
    batch_norm_failure: str
    without_dropout: bool
    sizes: list[int]


_KINDS = {kind.__name__: kind for kind in Event.__subclasses__()}


def event_from(values: dict[str, Any]) -> Event:
    """Return the event of a line of JSON."""
    fields = dict(values)
    return _KINDS[fields.pop("kind")].read(fields)
