"""Disable the mixed precision of a custom `parallelize` function while it is compared with one device.

`fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))` casts parameters to bfloat16 even in
a float64 model. A float64 check would then see only the rounding of bfloat16. Inside `full_precision` such a policy is
replaced by an empty one and recorded.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch.distributed import fsdp

__all__ = ["full_precision", "without_mixed_precision"]

_ACTIVE: list[set[str]] = []


@contextlib.contextmanager
def full_precision() -> Generator[set[str]]:
    """Disable the mixed precision of `fully_shard` in every `parallelize` function called in the block.

    Yields a set of descriptions such as "param_dtype=bfloat16, reduce_dtype=float32".
    """
    _ACTIVE.append(_ACTIVE[-1] if _ACTIVE else set())
    try:
        yield _ACTIVE[-1]
    finally:
        _ACTIVE.pop()


@contextlib.contextmanager
def without_mixed_precision() -> Generator[None]:
    """Disable mixed-precision policies of `fully_shard` if inside `full_precision`.

    The classes behind `fully_shard` are patched, because user code has imported the function itself by name.
    """
    if not _ACTIVE:
        yield
        return
    undo = [_patched(owner, name, _ACTIVE[-1]) for owner, name in _places()]
    try:
        yield
    finally:
        for put_back in undo:
            put_back()


def _places() -> list[tuple[Any, str]]:
    """Return the constructors that take a policy: module state and parameter group. [] if this torch has none."""
    inside: Any = getattr(fsdp, "_fully_shard", None)
    state = getattr(getattr(inside, "_fsdp_state", None), "FSDPState", None)
    group = getattr(getattr(inside, "_fsdp_param_group", None), "FSDPParamGroup", None)
    return [(state, "init"), (group, "__init__")] if state is not None and group is not None else []


def _patched(owner: Any, name: str, left_out: set[str]) -> Callable[[], None]:
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def called(*args: Any, **kwargs: Any) -> Any:
        return inner(
            *(_empty(value, left_out) for value in args),
            **{key: _empty(value, left_out) for key, value in kwargs.items()},
        )

    setattr(owner, name, called)
    return functools.partial(setattr, owner, name, inner)


def _empty(value: Any, left_out: set[str]) -> Any:
    """Replace a policy that casts by an empty one; return other values unchanged."""
    if not isinstance(value, fsdp.MixedPrecisionPolicy):
        return value
    dtypes = {key: dtype for key, dtype in vars(value).items() if isinstance(dtype, torch.dtype)}
    if dtypes:
        left_out.add(", ".join(f"{key}={str(dtype).removeprefix('torch.')}" for key, dtype in dtypes.items()))
    return fsdp.MixedPrecisionPolicy()
