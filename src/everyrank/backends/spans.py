"""What a profiler sees of a call."""

from __future__ import annotations

import contextlib
from typing import Any

from torch.autograd import profiler
from torch.profiler import record_function

__all__ = ["recorded"]


_NOTHING = contextlib.nullcontext()


def recorded(backend: str, name: str) -> contextlib.AbstractContextManager[Any]:
    """Under a profiler, the span of a call: "shm:all_reduce"."""
    return record_function(f"{backend}:{name}") if profiler._is_profiler_enabled else _NOTHING  # pyright: ignore
