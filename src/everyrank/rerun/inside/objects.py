"""State of the script's own objects: running statistics, and counters that their `state_dict` leaves out."""

from __future__ import annotations

import functools
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from everyrank.audit.watch.place import frames, is_own_file

__all__ = ["Counters", "own_objects", "running_statistics"]

_MOST_VISITED = 2000
_MOST_ITEMS = 64  # of a list or dict
_MOST_ELEMENTS = 100_000
_CENTER = ("mean", "avg", "average")
_SPREAD = ("var", "std", "sigma", "m2", "square")


@functools.cache
def _is_own(kind: type) -> bool:
    """Whether a class is the user's."""
    return is_own_file(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


def own_objects() -> list[Any]:
    """Objects of the user's classes that variables of the running functions hold, or that hold one another."""
    waiting = [value for frame in frames() for value in list(frame.f_locals.values())]
    objects, seen = list[Any](), set[int]()
    while waiting and len(seen) < _MOST_VISITED:
        value = waiting.pop(0)
        if id(value) in seen or isinstance(value, type | torch.Tensor | str | int | float):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            waiting += itertools.islice(list(value.values()), _MOST_ITEMS)
        elif isinstance(value, list | tuple):
            waiting += value[:_MOST_ITEMS]
        elif _is_own(type(value)) or isinstance(value, nn.Module):
            waiting += getattr(value, "__dict__", {}).values()
            if _is_own(type(value)):
                objects.append(value)
    return objects


def running_statistics(objects: list[Any]) -> Iterator[tuple[str, Any, list[str]]]:
    """(name, tensor, [file, class, attribute]) of each mean and variance that an object keeps."""
    counts = Counter[str]()
    for held in objects:
        kind = type(held)
        values = {
            **getattr(held, "__dict__", {}),
            **(dict(held.named_buffers(recurse=False)) if isinstance(held, nn.Module) else {}),
        }
        numbers = {name: tensor for name, value in values.items() if (tensor := _as_tensor(value)) is not None}
        if not all(any(word in name.lower() for name in numbers for word in words) for words in (_CENTER, _SPREAD)):
            continue
        counts[kind.__name__] += 1
        title = kind.__name__ if counts[kind.__name__] == 1 else f"{kind.__name__} ({counts[kind.__name__]})"
        for name, tensor in numbers.items():
            if any(word in name.lower() for word in (*_CENTER, *_SPREAD)):
                yield f"{title}.{name}", tensor, [_file(kind), kind.__name__, name]


def _as_tensor(value: Any) -> Any:
    """A number, an array or a tensor as a tensor; None for something else, or for one that is trained."""
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.size <= _MOST_ELEMENTS:
        return torch.from_numpy(value.copy())
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.requires_grad:
        return None
    return value if type(value) is torch.Tensor and value.numel() <= _MOST_ELEMENTS else None


def _file(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


class Counters:
    """The whole numbers of objects that have a `state_dict`, at each step."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, str], list[int]] = {}

    def note(self, objects: list[Any]) -> None:
        """Remember the numbers before a step."""
        for held in objects:
            for name, value in _counters(held).items():
                self.values.setdefault((id(held), name), []).append(value)

    def left_out(self, objects: list[Any]) -> list[list[str]]:
        """[file, class, attribute] of each number that grows evenly by update and is not in its object's state."""
        found: list[list[str]] = []
        for held in objects:
            counters = {name: value for name, value in _counters(held).items() if self._grows(held, name, value)}
            if not counters:
                continue
            known = {float(leaf) for leaf in _leaves(held.state_dict())}
            kind = type(held)
            found += [[_file(kind), kind.__name__, name] for name, value in counters.items() if value not in known]
        return found

    def _grows(self, held: Any, name: str, value: int) -> bool:
        values = [*self.values.get((id(held), name), []), value]
        steps = {after - before for before, after in itertools.pairwise(values[:-1])}
        return len(values) > 3 and len(steps) == 1 and steps.pop() > 0 and values[-1] >= values[-2]


def _counters(held: Any) -> dict[str, int]:
    if not callable(getattr(held, "state_dict", None)) or not callable(getattr(held, "load_state_dict", None)):
        return {}
    return {name: value for name, value in vars(held).items() if type(value) is int}


def _leaves(state: Any) -> Iterator[float]:
    """The single numbers in a state."""
    if isinstance(state, dict):
        for each in state.values():
            yield from _leaves(each)
    elif isinstance(state, list | tuple):
        for each in state[:_MOST_ITEMS]:
            yield from _leaves(each)
    elif isinstance(state, int | float) or (isinstance(state, torch.Tensor) and state.numel() == 1):
        yield float(state)
