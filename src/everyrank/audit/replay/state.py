"""Data classes of `audit --replay`: the backward passes of the first updates, and the model before each update."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from everyrank.audit.events import LossTerm

__all__ = [
    "ModelState",
    "RecordedBackward",
    "RecordedCall",
    "ReplayError",
    "TensorReference",
    "backward_path",
    "picklable",
]


class ReplayError(Exception):
    """The reason why an update cannot be replayed, as a text that follows `not checked: replay: `."""


@dataclasses.dataclass(frozen=True)
class TensorReference:
    """A placeholder in recorded arguments for a tensor that the replay recomputes. It has the tensor's `id()`."""

    tensor_id: int


@dataclasses.dataclass(frozen=True)
class PropertyGetter:
    """Reads a property of a tensor, such as `.T`, because torch's own function for it cannot be pickled."""

    name: str

    def __call__(self, tensor: Any, *_: Any) -> Any:
        return getattr(tensor, self.name)


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """A torch function between the model's output and the loss: its arguments, and the `id()` of each result."""

    function: Any
    args: Any
    kwargs: Any
    results: list[int]
    grad_enabled: bool


@dataclasses.dataclass
class RecordedBackward:
    """A forward with its backward.

    inputs      (args, kwargs) of the module
    rng_states  states of torch's RNGs before the forward: the CPU's, and the GPU's for a model on CUDA
    outputs     ids of the tensors that the forward returned
    calls       functions from the outputs to the loss
    loss_id     id of the tensor that backward was called on
    losses      losses in the graph of the backward
    """

    inputs: Any
    rng_states: list[Any]
    outputs: list[int] = dataclasses.field(default_factory=list[int])
    calls: list[RecordedCall] = dataclasses.field(default_factory=list[RecordedCall])
    loss_id: int = 0
    losses: list[LossTerm] = dataclasses.field(default_factory=list[LossTerm])


@dataclasses.dataclass
class ModelState:
    """The model before an update: parameters and buffers by name, and whether each module was in train mode."""

    tensors: dict[str, Any]
    are_training: list[bool]


def backward_path(folder: Path, rank: int, update: int, micro_batch: int | str) -> Path:
    """Return the file that a rank writes for a backward; `*` as `micro_batch` gives a pattern for all of an update."""
    return folder / f"rank{rank}.replay{update}.{micro_batch}.pt"


def picklable(function: Any) -> Any:
    """Return the function, or a `PropertyGetter` for the getter of a tensor property, which cannot be pickled."""
    descriptor: Any = getattr(function, "__self__", None)
    return PropertyGetter(descriptor.__name__) if type(descriptor).__name__ == "getset_descriptor" else function
