"""Futures, completed under the engine's lock, and what their callbacks start.

A callback may start a collective and wait for its future (torch's PowerSGD does). That wait moves nothing on, and its
thread holds the lock: nobody else could either. So a collective is done when a callback has started it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

__all__ = ["complete", "is_called_back"]

_THREAD = threading.local()


def is_called_back() -> bool:
    """Whether this thread is in a callback of a future."""
    return getattr(_THREAD, "is_inside", False)


def complete(future: torch.futures.Future[Any]) -> None:
    """Call back whoever waits for it, in this thread."""
    before, _THREAD.is_inside = is_called_back(), True
    try:
        future.set_result(None)
    finally:
        _THREAD.is_inside = before
