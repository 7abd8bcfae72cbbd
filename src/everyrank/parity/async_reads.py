"""Which asynchronous collective is read before somebody waits for it: one after the other gets NaN until then.

A check runs inside of `nan_until_wait`. Where its numbers are not finite, or differ, one update is run for each line
that has started an asynchronous collective, and only the buffers of that line hold NaN. The line whose NaN reach the
loss or a gradient is the one that is read too early.
"""

from __future__ import annotations

import dataclasses

import torch

from everyrank.backends.async_buffers import active_async_calls
from everyrank.data import Update
from everyrank.errors import NotFiniteError
from everyrank.layout import Layout
from everyrank.loop import run_updates, wrap_user_errors
from everyrank.parallel.mesh import local_tensors
from everyrank.parity.case import ParityCase
from everyrank.strategies import prepare
from everyrank.world import World
from everyrank.world.collectives import all_gather, all_gather_json

__all__ = ["read_before_wait"]

_PLACES = 16  # of lines that are tried
_FIRST = "first bad tensor: "


def read_before_wait(case: ParityCase, layout: Layout, world: World, update: Update) -> str:
    """The collective that is read before `wait()`, with its line and where NaN came first; "" where none is.

    A collective. Does nothing outside of `nan_until_wait`, and where user code has started no asynchronous collective.
    """
    calls = active_async_calls()
    if calls is None or layout.axis is None or world.group is None:
        return ""
    places: dict[str, str] = {}
    for of_rank in all_gather_json(calls.places, world.group):
        places |= of_rank
    if not places:
        return ""
    with calls.limited_to():
        if _spoilt(case, layout, world, update) is not None:
            return ""  # not finite without any NaN of ours
    for place, operation in sorted(places.items())[:_PLACES]:
        with calls.limited_to(place):
            spoilt = _spoilt(case, layout, world, update)
        if spoilt is not None:
            first = f"; the first tensor that has it is {spoilt}" if spoilt else ""
            return (
                f"the result of {operation}, which {place} starts, is read before work.wait(): until then the check "
                f"fills it with NaN, and NaN is what comes out{first}; wait for the work before the tensor is read"
            )
    return ""


def _spoilt(case: ParityCase, layout: Layout, world: World, update: Update) -> str | None:
    """Whether the loss or a gradient of this update is not finite: the first bad tensor, or ""; None where all are.

    The same on all ranks. A collective.
    """
    with wrap_user_errors():
        prepared = prepare(case.workload, dataclasses.replace(layout, precision="float64"), world)
    first, is_bad = "", False
    try:
        shares = list(run_updates(prepared, case.train_data, [update]))
    except NotFiniteError as error:
        is_bad, first = True, str(error).partition(_FIRST)[2]
    else:
        gradients = [one.grad for one in prepared.trainable.parameters if one.grad is not None]
        is_bad = not all(bool(one.isfinite().all()) for one in [*shares, *local_tensors(gradients)])
    flags = all_gather(torch.tensor([int(is_bad)]), world)
    return first if any(int(flag) for flag in flags) else None
