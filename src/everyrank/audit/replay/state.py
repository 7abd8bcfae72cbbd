"""The recorded backwards and models of the first updates for `audit --replay`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from everyrank.audit.events import LossTerm

__all__ = [
    "RecordedBackward",
    "RecordedCall",
    "ReplayError",
    "ReplayState",
    "TensorReference",
    "backward_path",
    "picklable",
]


class ReplayError(Exception):
    """The reason why an update cannot be replayed, as a text that follows `not checked: replay: `."""


@dataclasses.dataclass(frozen=True)
class TensorReference:
    """Stands for a tensor that the replay computes again, by its number."""

    number: int


@dataclasses.dataclass(frozen=True)
class PropertyGetter:
    """Reads a property of a tensor, such as `.T`, because torch's own function for it cannot be pickled."""

    name: str

    def __call__(self, tensor: Any, *_: Any) -> Any:
        return getattr(tensor, self.name)


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """A torch function between the model's output and the loss: its arguments, and the numbers of its results."""

    function: Any
    args: Any
    kwargs: Any
    results: list[int]
    is_grad: bool


@dataclasses.dataclass
class RecordedBackward:
    """A forward with its backward.

    inputs      (args, kwargs) of the module
    generator   states of torch's generators before the forward: of the CPU, and of the CUDA device if there is one
    outputs     numbers of the tensors that the forward returned
    calls       functions from the outputs to `root`
    root        number of the tensor that backward was called on
    losses      losses in the graph of the backward
    """

    inputs: Any
    generator: list[Any]
    outputs: list[int] = dataclasses.field(default_factory=list[int])
    calls: list[RecordedCall] = dataclasses.field(default_factory=list[RecordedCall])
    root: int = 0
    losses: list[LossTerm] = dataclasses.field(default_factory=list[LossTerm])


@dataclasses.dataclass
class ReplayState:
    """The model before an update: parameters and buffers by name, and whether each module was in train mode."""

    tensors: dict[str, Any]
    are_training: list[bool]


def backward_path(folder: Path, rank: int, update: int, micro: int | str) -> Path:
    """The file that a rank writes for a backward."""
    return folder / f"rank{rank}.replay{update}.{micro}.pt"


def picklable(function: Any) -> Any:
    """The function, or an equivalent `PropertyGetter` if it reads a property, because that cannot be pickled."""
    descriptor: Any = getattr(function, "__self__", None)
    return PropertyGetter(descriptor.__name__) if type(descriptor).__name__ == "getset_descriptor" else function
