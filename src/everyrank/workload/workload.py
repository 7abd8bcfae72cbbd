"""The mathematics of a training: model, data, loss, optimizer, global batch, seed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from everyrank.errors import UsageError, WorkloadError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

__all__ = ["Source", "Workload", "changed"]


@dataclass(frozen=True)
class Source:
    """The name or file of a workload, which is sent to the ranks because lambdas do not pickle.

    `place` is a built-in name or `path/file.py[:name]`, and `settings` are arguments of the function there. `batch`
    overrides the global batch, and `lr_rule` sets how the learning rate follows it (`batch.LR_RULES`). `epochs` or
    `steps` override the length. `saved` are settings of the resumed checkpoint, used where `settings` does not override
    them.

    Raises `UsageError` for a batch without samples, and for a rule without a batch.
    """

    place: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    batch: int | None = None
    lr_rule: str = "none"
    epochs: int | None = None
    steps: int | None = None
    saved: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if self.batch is not None and self.batch < 1:
            raise UsageError(f"--batch {self.batch}: give at least 1 sample")
        if self.batch is None and self.lr_rule != "none":
            raise UsageError(
                f"--lr-rule {self.lr_rule}: the rule scales the learning rate with --batch N; add --batch N"
            )


@dataclass(frozen=True)
class Workload:
    """The mathematics of a training: model, data, loss, optimizer and global batch, independent of where it runs.

    The first six fields are required. In the descriptions, `(output, target) -> (sum, count)` is a function of these
    arguments that returns a pair. N is the number of samples of a micro-batch, D a feature dimension.

    Attributes:
        name: Shown in tables and file names.
        model: `() -> nn.Module`. Called in every process, after seeding.
        train_data: `() -> Dataset` of (input, target); each is a tensor, or a tuple or dict of tensors. Return all of
            the data on every rank, because everyrank divides it. If the data can only be iterated, each reader reads
            the whole stream. Random numbers drawn inside `dataset[i]` (torch, numpy, random) become a function of
            (seed, epoch, i). A dataset that draws none can set `deterministic = True` and save 12 us a sample.
        loss: `(output, target) -> (sum, count)`: the sum of the loss terms, shape (), and the number of terms.
        optimizer: `(model) -> torch.optim.Optimizer`. Called after sharding, with the module that has the parameters.
        global_batch: Samples per update over all ranks.
        eval_data: `() -> Dataset`. None: no evaluation.
        collate: List of samples -> (input, target). Default: torch's.
        metrics: `{"top1": (output, target) -> (sum, count)}`, summed exactly over all ranks. A metric whose name
            begins with an underscore ("_hits") is only an input of `derived`, and appears in no table, log or Record.
        derived: `{"perplexity": (means) -> number}`, computed from the exact means of the evaluation and eval_loss.
        predict: `(output) -> Tensor (N, ...)`: the rows that `everyrank predict` writes. Default: the output itself.
        schedule: `(optimizer) -> LRScheduler`, stepped once per update; a ReduceLROnPlateau once per epoch, with the
            loss on eval_data.
        on_epoch: `(epoch, metrics, predict) -> None`. `everyrank train` calls it on rank 0 after each epoch with the
            results of the evaluation. `predict(input)` is the model's output for a batch.
        epochs: Length of the training in epochs. Default: one epoch. Give `epochs` or `steps`.
        steps: Length of the training in updates.
        drop_last: Drop the last training batch of an epoch if it is smaller than the others.
        eval_batch: Samples of an evaluation batch over all ranks. Default: global_batch.
        order: "global": a random order of all samples in each epoch (for a stream, its own order). "shard": each rank
            reads one part of the files in `train_data().shard_sizes`, so the samples of an update depend on the number
            of ranks; or whole streams of `train_data().streams` until they end, which does not depend on it.
        weights: `() ->` one number for each training sample. An epoch then draws that many samples with replacement,
            in proportion to the weights, the same on all ranks (torch's WeightedRandomSampler).
        seed: Seed of initial weights, sample order, augmentation and dropout.
        dropout: "exact": dropout masks are a function of (seed, update, sample, position), the same under every
            layout. "torch": torch draws them, separately on each rank.
        ema_decay: Keep a moving average of the weights: after each update decay * average + (1 - decay) * weight.
            Evaluation, `everyrank predict` and exported weights use the average.
        clip_norm: Largest global norm of the gradients.
        blocks: Dotted path of the repeated blocks ("layers"): the units of FSDP, activation checkpointing and
            pipeline stages.
        tensor_plan: `{"layers.*.query": "colwise", ...}` for tensor-parallel layouts.
        experts: Path of the experts of a mixture ("layers.*.experts") for expert-parallel layouts. Their parameters
            are stacked by expert along dimension 0. They are called as (tokens (N, D), chosen experts (N, K), weights
            (N, K)) and return the weighted sum over the chosen experts, (N, D).
        sequence_dim: The sequence dimension of the input, for context-parallel layouts.
        num_devices: Number of devices of the model. Above 1, `model` is called with a list of that many devices and
            places its parts on them. They are the same device unless the layout has devices=2.
        batch_rule: Set by everyrank: how the learning rate follows a different global batch.
        source: Set by `find_workload`. Without it, the object itself is sent to the ranks by value, for example after
            `dataclasses.replace`.

    Raises:
        WorkloadError: A value is invalid.

    Examples:
        >>> import torch
        >>> from everyrank import Workload
        >>> def loss(output, target):
        ...     return torch.nn.functional.mse_loss(output, target, reduction="sum"), target.numel()
        >>> workload = Workload(
        ...     name="line",
        ...     model=lambda: torch.nn.Linear(1, 1),
        ...     train_data=lambda: [(torch.ones(1), torch.ones(1))] * 64,
        ...     loss=loss,
        ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        ...     global_batch=16,
        ... )
        >>> workload.loss(torch.zeros(2, 1), torch.ones(2, 1))
        (tensor(2.), 2)
    """

    name: str
    model: Callable[..., nn.Module]
    train_data: Callable[[], Any]
    loss: Callable[[Any, Any], tuple[Any, Any]]
    optimizer: Callable[[nn.Module], Optimizer]
    global_batch: int
    eval_data: Callable[[], Any] | None = None
    collate: Callable[[Sequence[Any]], tuple[Any, Any]] | None = None
    metrics: Mapping[str, Callable[[Any, Any], tuple[Any, Any]]] = field(default_factory=dict[str, Any])
    derived: Mapping[str, Callable[[Mapping[str, float]], float]] = field(default_factory=dict[str, Any])
    predict: Callable[[Any], Any] | None = None
    schedule: Callable[[Optimizer], LRScheduler] | None = None
    on_epoch: Callable[[int, dict[str, float], Callable[[Any], Any]], None] | None = None
    epochs: int | None = None
    steps: int | None = None
    drop_last: bool = False
    eval_batch: int | None = None
    order: str = "global"
    weights: Callable[[], Sequence[float]] | None = None
    seed: int = 0
    dropout: str = "exact"
    ema_decay: float | None = None
    clip_norm: float | None = None
    blocks: str | None = None
    tensor_plan: Mapping[str, str] | None = None
    experts: str | None = None
    sequence_dim: int | None = None
    num_devices: int = 1
    batch_rule: str | None = field(default=None, compare=False)
    source: Source | None = field(default=None, compare=False, init=False)

    def __post_init__(self) -> None:
        self._check_name()
        for name in ("model", "train_data", "loss", "optimizer"):
            self._require_callable(name, getattr(self, name))
        if _is_module(self.model):
            kind = type(self.model).__name__
            raise WorkloadError(
                f"workload {self.name}: model={kind}(...) is an instance. Give a function that builds it: "
                f"model={kind}, or model=lambda: {kind}(...)"
            )
        for name in ("eval_data", "collate", "schedule", "predict", "weights", "on_epoch"):
            if getattr(self, name) is not None:
                self._require_callable(name, getattr(self, name))
        self._check_numbers()
        self._check_paths()
        for name in ("metrics", "derived"):
            if not isinstance(getattr(self, name), Mapping):
                raise WorkloadError(f"workload {self.name}: {name}={getattr(self, name)!r}: give a dict of functions")
            functions: Mapping[object, object] = getattr(self, name)
            for key, function in functions.items():
                if not isinstance(key, str) or not key or not key.isprintable():
                    raise WorkloadError(f"workload {self.name}: {name}: the name {key!r} must be printable text")
                self._require_callable(f"{name}[{key!r}]", function)

    def _check_name(self) -> None:
        if not isinstance(self.name, str) or not self.name or not self.name.isprintable():
            raise WorkloadError(f"name={self.name!r}: a workload needs a printable name")
        if "/" in self.name or "\\" in self.name:
            raise WorkloadError(f"name={self.name!r}: folders of runs are named after it; leave out slashes")

    def _check_paths(self) -> None:
        """Check the paths of modules and the sequence dimension."""
        for name in ("blocks", "experts"):
            value: object = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise WorkloadError(f'workload {self.name}: {name}={value!r}: give a path in the model, like "layers"')
        plan: object = self.tensor_plan
        pairs = plan.items() if isinstance(plan, Mapping) else None
        if plan is not None and (pairs is None or not all(isinstance(word, str) for pair in pairs for word in pair)):
            raise WorkloadError(
                f'workload {self.name}: tensor_plan={plan!r}: give a dict, like {{"layers.*.query": "colwise"}}'
            )
        dim: object = self.sequence_dim
        if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool)):
            raise WorkloadError(f"workload {self.name}: sequence_dim={dim!r}: give the number of a dimension")

    def _check_numbers(self) -> None:
        for name in ("global_batch", "num_devices", "epochs", "steps", "eval_batch"):
            value: object = getattr(self, name)
            if name in ("epochs", "steps", "eval_batch") and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise WorkloadError(f"workload {self.name}: {name}={value!r}: give a whole number of at least 1")
        if self.epochs is not None and self.steps is not None:
            raise WorkloadError(
                f"workload {self.name}: epochs={self.epochs} and steps={self.steps}: give one of the two"
            )
        if not isinstance(self.drop_last, bool):
            raise WorkloadError(f"workload {self.name}: drop_last={self.drop_last!r}: give True or False")
        if self.order not in ("global", "shard"):
            raise WorkloadError(f"workload {self.name}: order={self.order!r}: give global or shard")
        if self.dropout not in ("exact", "torch"):
            raise WorkloadError(f"workload {self.name}: dropout={self.dropout!r}: give exact or torch")
        if self.order == "shard" and self.weights is not None:
            raise WorkloadError(f"workload {self.name}: weights draw from all samples; use order='global'")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not -(2**63) <= self.seed < 2**64:
            raise WorkloadError(f"workload {self.name}: seed={self.seed!r}: give a whole number of 64 bits")
        if self.ema_decay is not None and not (isinstance(self.ema_decay, float) and 0 < self.ema_decay < 1):
            raise WorkloadError(f"workload {self.name}: ema_decay={self.ema_decay!r}: give a number between 0 and 1")
        norm: object = self.clip_norm
        if norm is not None and (isinstance(norm, bool) or not isinstance(norm, int | float) or not norm > 0):
            raise WorkloadError(f"workload {self.name}: clip_norm={self.clip_norm!r}: give a number above 0, or None")

    def _require_callable(self, name: str, value: object) -> None:
        if not callable(value):
            raise WorkloadError(f"workload {self.name}: {name}={value!r}: give a function, not {type(value).__name__}")


def _is_module(value: object) -> bool:
    """Whether this is an `nn.Module`; False if torch has not been imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def changed(workload: Workload, **fields: Any) -> Workload:
    """Return the workload with some fields replaced and its source kept, which the caller knows to be still valid."""
    result = replace(workload, **fields)
    object.__setattr__(result, "source", workload.source)
    return result
