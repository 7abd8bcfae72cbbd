"""Records states of the script's own objects: running statistics, and counters that `state_dict` leaves out."""

from __future__ import annotations

import itertools
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from everyrank.audit.watch.source_location import is_user_class, user_frames

__all__ = ["Counters", "running_statistics", "user_objects"]

_MAX_VISITED = 2000
_MAX_ITEMS = 64  # of a list or dict
_MAX_ELEMENTS = 100_000
_CENTER = ("mean", "avg", "average")
_SPREAD = ("var", "std", "sigma", "m2", "square")


def user_objects() -> list[Any]:
    """Objects of the user's classes that are reachable from variables of the running functions."""
    queue = deque(value for frame in user_frames() for value in list(frame.f_locals.values()))
    objects, seen = list[Any](), set[int]()
    while queue and len(seen) < _MAX_VISITED:
        value = queue.popleft()
        if id(value) in seen or isinstance(value, type | torch.Tensor | str | int | float):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            queue += itertools.islice(list(value.values()), _MAX_ITEMS)
        elif isinstance(value, list | tuple):
            queue += value[:_MAX_ITEMS]
        elif is_user_class(type(value)) or isinstance(value, nn.Module):
            queue += getattr(value, "__dict__", {}).values()
            if is_user_class(type(value)):
                objects.append(value)
    return objects


def running_statistics(objects: list[Any]) -> Iterator[tuple[str, Any, list[str]]]:
    """Yield (name, tensor, [file, class, attribute]) of each running mean and variance of an object."""
    counts = Counter[str]()
    for instance in objects:
        user_class = type(instance)
        values = {
            **getattr(instance, "__dict__", {}),
            **(dict(instance.named_buffers(recurse=False)) if isinstance(instance, nn.Module) else {}),
        }
        if not _have_statistics(values):  # most objects; their values need not be converted
            continue
        tensors = {name: tensor for name, value in values.items() if (tensor := _as_tensor(value)) is not None}
        if not _have_statistics(tensors):
            continue
        counts[user_class.__name__] += 1
        title = (
            user_class.__name__
            if counts[user_class.__name__] == 1
            else f"{user_class.__name__} ({counts[user_class.__name__]})"
        )
        for name, tensor in tensors.items():
            if any(name_part in name.lower() for name_part in (*_CENTER, *_SPREAD)):
                yield f"{title}.{name}", tensor, [_file(user_class), user_class.__name__, name]


def _have_statistics(names: Iterable[str]) -> bool:
    """Whether one name is that of a mean, and one that of a variance or the like."""
    lower_names = [name.lower() for name in names]
    return all(
        any(name_part in name for name in lower_names for name_part in name_parts) for name_parts in (_CENTER, _SPREAD)
    )


def _as_tensor(value: Any) -> Any:
    """A number, an array or a tensor as a tensor; None for other values, and for trained tensors."""
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.size <= _MAX_ELEMENTS:
        return torch.from_numpy(value.copy())
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.requires_grad:
        return None
    return value if type(value) is torch.Tensor and value.numel() <= _MAX_ELEMENTS else None


def _file(user_class: type) -> str:
    return getattr(sys.modules.get(user_class.__module__), "__file__", None) or ""


class Counters:
    """Records the integer attributes of objects with a `state_dict`, at each step."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, str], list[int]] = {}

    def record(self, objects: list[Any]) -> None:
        """Record the integers before a step."""
        for instance in objects:
            for name, value in _counters(instance).items():
                self.values.setdefault((id(instance), name), []).append(value)

    def missing_from_state(self, objects: list[Any]) -> list[list[str]]:
        """[file, class, attribute] of each integer that grows evenly per update and is not in its object's state."""
        missing: list[list[str]] = []
        for instance in objects:
            counters = {
                name: value for name, value in _counters(instance).items() if self._grows(instance, name, value)
            }
            if not counters:
                continue
            saved_numbers = {float(leaf) for leaf in _leaves(instance.state_dict())}
            user_class = type(instance)
            missing += [
                [_file(user_class), user_class.__name__, name]
                for name, value in counters.items()
                if value not in saved_numbers
            ]
        return missing

    def _grows(self, instance: Any, name: str, value: int) -> bool:
        values = [*self.values.get((id(instance), name), []), value]
        steps = {after - before for before, after in itertools.pairwise(values[:-1])}
        return len(values) > 3 and len(steps) == 1 and steps.pop() > 0 and values[-1] >= values[-2]


def _counters(instance: Any) -> dict[str, int]:
    if not callable(getattr(instance, "state_dict", None)) or not callable(getattr(instance, "load_state_dict", None)):
        return {}
    return {name: value for name, value in vars(instance).items() if type(value) is int}


def _leaves(state: Any) -> Iterator[float]:
    """Yield the numbers in a state."""
    if isinstance(state, dict):
        for each in state.values():
            yield from _leaves(each)
    elif isinstance(state, list | tuple):
        for each in state[:_MAX_ITEMS]:
            yield from _leaves(each)
    elif isinstance(state, int | float) or (isinstance(state, torch.Tensor) and state.numel() == 1):
        yield float(state)
