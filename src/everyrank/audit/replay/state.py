"""What is recorded of the first updates for `audit --replay`, as it is written to files."""

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
    """Why an update cannot be replayed, in words that follow `not checked: replay: `."""


@dataclasses.dataclass(frozen=True)
class TensorReference:
    """In place of a tensor that the replay computes again: its number."""

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
    generator   states of torch's generators before it: the CPU's, and the CUDA device's if there is one
    outputs     numbers of the tensors that it returned
    calls       functions that lead from there to `root`
    root        number of the tensor that backward was called on
    losses      that the backward went through
    """

    inputs: Any
    generator: list[Any]
    outputs: list[int] = dataclasses.field(default_factory=list[int])
    calls: list[RecordedCall] = dataclasses.field(default_factory=list[RecordedCall])
    root: int = 0
    losses: list[LossTerm] = dataclasses.field(default_factory=list[LossTerm])


@dataclasses.dataclass
class ReplayState:
    """The model before an update: its parameters and buffers by name, and which of its modules were in train mode."""

    tensors: dict[str, Any]
    are_training: list[bool]


def backward_path(folder: Path, rank: int, update: int, micro: int | str) -> Path:
    """The file that a rank writes for a backward."""
    return folder / f"rank{rank}.replay{update}.{micro}.pt"


def picklable(function: Any) -> Any:
    """The function itself, or an equivalent one where it reads a property and cannot be pickled."""
    descriptor: Any = getattr(function, "__self__", None)
    return PropertyGetter(descriptor.__name__) if type(descriptor).__name__ == "getset_descriptor" else function
