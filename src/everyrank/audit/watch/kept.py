"""What is kept of the first updates, and written to files, for `audit --replay`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from everyrank.audit.events import LossTerm

__all__ = ["Kept", "KeptBackward", "ReplayError", "State", "Step", "backward_path", "writable"]


class ReplayError(Exception):
    """Why not, in words that follow `not checked: replay: `."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """In place of a tensor that is computed again: the number by which it is known."""

    number: int


@dataclasses.dataclass(frozen=True)
class Getter:
    """A property of a tensor (`.T`): torch's function for it cannot be written to a file."""

    name: str

    def __call__(self, tensor: Any, *_: Any) -> Any:
        return getattr(tensor, self.name)


@dataclasses.dataclass(frozen=True)
class Step:
    """A torch function between the model's output and the loss: what it was given, the tensors that it returned."""

    function: Any
    args: Any
    kwargs: Any
    results: list[int]
    is_grad: bool


@dataclasses.dataclass
class KeptBackward:
    """A forward with its backward.

    inputs      (args, kwargs) of the module
    generator   the state of torch's generators before it: the CPU's, and the CUDA device's where there is one
    outputs     the numbers of the tensors in what it returned
    steps       what led from there to `root`, the tensor that backward was called on
    losses      `Losses.backward_done`: name, line, terms, reduction, scale
    """

    inputs: Any
    generator: list[Any]
    outputs: list[int] = dataclasses.field(default_factory=list)
    steps: list[Step] = dataclasses.field(default_factory=list)
    root: int = 0
    losses: list[LossTerm] = dataclasses.field(default_factory=list[LossTerm])


@dataclasses.dataclass
class State:
    """The model before an update: its parameters and buffers by name, and which of its modules were in train mode."""

    tensors: dict[str, Any]
    are_training: list[bool]


def backward_path(folder: Path, rank: int, update: int, micro: int | str) -> Path:
    """Where a rank writes a backward."""
    return folder / f"rank{rank}.replay{update}.{micro}.pt"


def writable(function: Any) -> Any:
    """It, or what stands in for it: torch's functions can be written by their names, but for getters of a property."""
    owner: Any = getattr(function, "__self__", None)
    return Getter(owner.__name__) if type(owner).__name__ == "getset_descriptor" else function
