"""Restores a dataset after the audit has read samples of it: file handles, caches, counters and generators.

The script must find its dataset as it left it. For example, a dataset that opens its file at the first read can only be
sent to spawned workers before this read, and forked workers would share the offset of the open file.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from everyrank.audit.watch.source_location import is_user_class

__all__ = ["restored_dataset"]

_MAX_VISITED = 10_000
_MAX_ITEMS = 1000  # visited of a list, tuple, dict or set


@contextlib.contextmanager
def restored_dataset(dataset: Any) -> Generator[None]:
    """At the end, restore the datasets, containers, generators and objects of the user's classes in a dataset.

    Other objects stay as they are, because their attributes may have to agree with a state in C.
    """
    restores = list[Callable[[], Any]]()
    queue, visited = [dataset], dict[int, Any]()
    while queue and len(visited) < _MAX_VISITED:
        value = queue.pop()
        if id(value) not in visited:
            visited[id(value)] = value
            restore, parts = _saved(value)
            restores.append(restore)
            queue += itertools.islice(parts, _MAX_ITEMS)
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _saved(value: Any) -> tuple[Callable[[], Any], Iterable[Any]]:
    """Return a function that restores an object without its parts, and the parts."""
    if isinstance(value, list):
        items = [*value]
        return partial(value.__setitem__, slice(None), items), items
    if isinstance(value, dict | set):
        return partial(_refill, value, value.copy()), [*(value.values() if isinstance(value, dict) else value)]
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state()), ()
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate()), ()
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state()), ()
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state), ()
    if (isinstance(value, Dataset) or is_user_class(type(value))) and hasattr(value, "__dict__"):
        return partial(_refill, vars(value), dict(vars(value))), [*vars(value).values()]
    return _do_nothing, value if isinstance(value, tuple) else ()


def _refill(container: Any, items: Any) -> None:
    container.clear()
    container.update(items)


def _do_nothing() -> None:
    pass
