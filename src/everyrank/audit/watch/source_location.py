"""Finds the line of the user's code that is running."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

from everyrank.errors import is_user_code

__all__ = ["is_user_class", "is_user_file", "library_calls", "user_frames", "user_line"]

_WATCH = str(Path(__file__).parent)
_RECIPES = str(Path(__file__).parents[2] / "recipes") + os.sep


_WRAPPERS = {"wrapper", "handle_torch_function", "inner", "_fn"}  # functions of torch around each collective


@functools.cache
def is_user_file(filename: str) -> bool:
    """Whether a file is the user's: not Python, an installed package or everyrank, except for its recipes."""
    return is_user_code(filename) or filename.startswith(_RECIPES)


@functools.cache
def is_user_class(user_class: type) -> bool:
    """Whether a class is the user's."""
    return is_user_file(getattr(sys.modules.get(user_class.__module__), "__file__", None) or "")


def user_frames() -> Iterator[FrameType]:
    """The frames of the user's own code, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _location(frame: FrameType) -> str:
    return f"{os.path.abspath(frame.f_code.co_filename)}:{frame.f_lineno}"  # noqa: PTH100  (called at every forward)


def user_line() -> str:
    """`/path/train.py:12`, the innermost line of the user's own code; "" if none is on the stack."""
    return next((_location(frame) for frame in user_frames()), "")


def user_lines() -> list[str]:
    """All lines of the user's own code on the stack, the innermost first."""
    return [_location(frame) for frame in user_frames()]


def library_calls() -> list[str]:
    """The names of the library functions between the user's innermost line and here, the first called first."""
    frame: FrameType | None = sys._getframe(1)
    names: list[str] = []
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        name = frame.f_code.co_name
        if not frame.f_code.co_filename.startswith(_WATCH) and name not in _WRAPPERS and names[-1:] != [name]:
            names.append(name)
        frame = frame.f_back
    return names[::-1][:24]


def is_called_by(name: str, package: str) -> bool:
    """Whether a function of this name, of this installed package, is on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == name and module.partition(".")[0] == package:
            return True
        frame = frame.f_back
    return False


def calling_codes() -> Iterator[CodeType]:
    """The code of each function on the stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def caller_is_user_code() -> bool:
    """Whether the user's own code called the caller of this function, perhaps through a wrapper of torch or ours."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (
        frame.f_code.co_filename.startswith(_WATCH) or frame.f_code.co_filename.endswith(_TORCH_WRAPPERS)
    ):
        frame = frame.f_back
    return frame is not None and is_user_file(frame.f_code.co_filename)


_TORCH_WRAPPERS = ("torch/_tensor.py", "torch/overrides.py", "torch/utils/_device.py")
