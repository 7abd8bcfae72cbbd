"""Makes command line flags from a dataclass whose fields have an `Argument`, and reads them back."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, get_args

from everyrank.options import Argument, arguments_of

__all__ = ["add_options", "options_of"]

_Options = TypeVar("_Options")


def add_options(
    parser: argparse.ArgumentParser, options: type[Any], skip: Collection[str] = (), **special: Mapping[str, Any]
) -> None:
    """Add a flag for each field of the dataclass `options` that has an `Argument`.

    `skip` names fields whose flag exists already. `special` has additional keywords for argparse by the field's name.
    """
    for name, (kind, argument) in arguments_of(options).items():
        if name in skip:
            continue
        default = getattr(options, name, dataclasses.MISSING)
        keywords: dict[str, Any] = {**_keywords(kind, argument, default), **special.get(name, {})}
        parser.add_argument(argument.flag, dest=name, help=argument.help, **keywords)


def _keywords(kind: Any, argument: Argument, default: Any) -> dict[str, Any]:
    """Return the keywords of argparse for a field of type bool, tuple[str, ...], or int, str or Path, optionally None.

    A field with several types needs `special` keywords.
    """
    if kind is bool:
        return {"action": "store_true"}
    if kind == tuple[str, ...]:
        return {"nargs": "+", "action": "extend", "default": [], "metavar": argument.metavar}
    kind = next(member for member in get_args(kind) or [kind] if member is not type(None))
    if default is dataclasses.MISSING:
        return {"type": kind, "required": True, "metavar": argument.metavar}
    return {"type": kind, "default": default, "metavar": argument.metavar}


def options_of(args: argparse.Namespace, options: type[_Options], **others: Any) -> _Options:
    """Return the options given on the command line; `others` override them or set fields without a flag."""
    values = {name: getattr(args, name) for name in arguments_of(options)}
    return options(**{**values, **others})
