"""Checks the fields of a dataclass against their annotations: Python callers may give anything."""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from everyrank.errors import UsageError

__all__ = ["check_fields"]


def check_fields(instance: Any) -> None:
    """Compare each field with its annotation. A string becomes a `Path` where a path belongs, a list a tuple.

    It checks int, float, bool, str, Path, tuple[str, ...] and unions of them. True is not a number.

    Raises `UsageError` that names the first field with a wrong value.

    >>> check_fields(Launch(loader_workers=1.5))
    UsageError: loader_workers=1.5: give a whole number
    """
    for name, annotation in get_type_hints(type(instance), include_extras=True).items():
        value = getattr(instance, name)
        kinds = _kinds_of(annotation)
        if not all(kind in _KINDS for kind in kinds):
            continue
        if not any(_KINDS[kind][1](value) for kind in kinds):
            wanted = " or ".join(dict.fromkeys(_KINDS[kind][0] for kind in kinds))
            raise UsageError(f"{name}={value!r}: give {wanted}")
        if Path in kinds and value == "":  # it would mean the current folder
            raise UsageError(f"{name}='': give a path")
        if Path in kinds and isinstance(value, str):
            object.__setattr__(instance, name, Path(value))
        elif tuple in kinds:
            object.__setattr__(instance, name, tuple(value))


def _kinds_of(annotation: Any) -> list[Any]:
    """Return the types that a field accepts: each member of a union, `tuple` for tuple[str, ...]."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for member in get_args(annotation) for kind in _kinds_of(member)]
    if annotation == tuple[str, ...]:
        return [tuple]
    return [annotation]


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list_of_text(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(item, str) for item in value)


_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number", _is_integer),
    float: ("a number", _is_number),
    bool: ("True or False", lambda value: isinstance(value, bool)),
    str: ("text", lambda value: isinstance(value, str)),
    Path: ("a path", lambda value: isinstance(value, str | os.PathLike)),
    tuple: ("a list of text", _is_list_of_text),
    type(None): ("None", lambda value: value is None),
}
