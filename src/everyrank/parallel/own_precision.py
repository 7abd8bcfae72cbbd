"""Mixed precision inside a custom `parallelize` function, left out while it is compared with one device.

`fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))` casts parameters to bfloat16 also
where the model is float64. A check in float64 would then find bfloat16's rounding everywhere, and no mistake behind it.
Inside `full_precision` such a policy is replaced by an empty one, and what it would have done is noted.
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
    """Leave out the mixed precision of `fully_shard` in every `parallelize` function that is called meanwhile.

    Yields what was left out, in words: "param_dtype=bfloat16, reduce_dtype=float32".
    """
    _ACTIVE.append(_ACTIVE[-1] if _ACTIVE else set())
    try:
        yield _ACTIVE[-1]
    finally:
        _ACTIVE.pop()


@contextlib.contextmanager
def without_mixed_precision() -> Generator[None]:
    """While a `parallelize` function runs: inside `full_precision`, `fully_shard` gets no policy.

    The classes behind `fully_shard` are patched, not the function, which user code has imported by name.
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
    """Where a policy comes in: the state of a module, and its group of parameters. None in a torch without them."""
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
    """A policy that casts nothing in place of one that does; anything else as it is."""
    if not isinstance(value, fsdp.MixedPrecisionPolicy):
        return value
    dtypes = {key: dtype for key, dtype in vars(value).items() if isinstance(dtype, torch.dtype)}
    if dtypes:
        left_out.add(", ".join(f"{key}={str(dtype).removeprefix('torch.')}" for key, dtype in dtypes.items()))
    return fsdp.MixedPrecisionPolicy()
