"""Lets torch.compile return its argument, because the hooks cannot record what a compiled function does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["skip_compilation"]


def skip_compilation(on_skip: Callable[[], None]) -> None:
    """Replace `torch.compile`, which then calls `on_skip`, and `Module.compile` by functions that compile nothing.

    A model has the attribute `_orig_mod`, as a compiled one has.
    """

    @functools.wraps(torch.compile)
    def uncompiled(model: Any = None, *_args: Any, **_kwargs: Any) -> Any:
        on_skip()
        return _as_compiled if model is None else _as_compiled(model)  # without a model, it is a decorator with options

    torch.compile = uncompiled
    torch.nn.Module.compile = lambda *_args, **_kwargs: None


def _as_compiled(model: Any) -> Any:
    if isinstance(model, torch.nn.Module):
        model.__dict__["_orig_mod"] = model
    return model
