"""Find the asynchronous collective whose result is read before `wait()`.

A check runs inside `nan_until_wait`, which fills the buffers of asynchronous collectives with NaN until they are
waited for. If the numbers differ or are not finite, one update runs for each line of code that started an asynchronous
collective, with NaN only in the buffers of that line. If NaN reaches the loss or a gradient, that line is the cause.
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

_MAX_LINES = 16  # each line costs one update
_FIRST = "first bad tensor: "


def read_before_wait(case: ParityCase, layout: Layout, world: World, update: Update) -> str:
    """Return a message that names the collective read before `wait()`, its line and the first NaN tensor, or "".

    A collective. Does nothing outside `nan_until_wait`, or if user code has started no asynchronous collective.
    """
    calls = active_async_calls()
    if calls is None or layout.axis is None or world.group is None:
        return ""
    lines: dict[str, str] = {}
    for lines_of_rank in all_gather_json(calls.locations, world.group):
        lines |= lines_of_rank
    if not lines:
        return ""
    with calls.limited_to():
        if _first_nonfinite_tensor(case, layout, world, update) is not None:
            return ""  # the update is not finite even without the NaN of this check
    for line, operation in sorted(lines.items())[:_MAX_LINES]:
        with calls.limited_to(line):
            nonfinite_tensor = _first_nonfinite_tensor(case, layout, world, update)
        if nonfinite_tensor is not None:
            where = f" (first in {nonfinite_tensor})" if nonfinite_tensor else ""
            return (
                f"the result of {operation}, which {line} starts, is read before work.wait(): the check fills it with "
                f"NaN until then, and the NaN reaches the update{where}; wait for the work before you read the tensor"
            )
    return ""


def _first_nonfinite_tensor(case: ParityCase, layout: Layout, world: World, update: Update) -> str | None:
    """Return the first tensor of this update that is not finite ("" if it is unknown), or None if all are finite.

    The result is identical on all ranks. A collective.
    """
    with wrap_user_errors():
        prepared = prepare(case.workload, dataclasses.replace(layout, precision="float64"), world)
    tensor_name, is_bad = "", False
    try:
        shares = list(run_updates(prepared, case.train_data, [update]))
    except NotFiniteError as error:
        is_bad, tensor_name = True, str(error).partition(_FIRST)[2]
    else:
        gradients = [tensor.grad for tensor in prepared.trainable.parameters if tensor.grad is not None]
        is_bad = not all(bool(tensor.isfinite().all()) for tensor in [*shares, *local_tensors(gradients)])
    flags = all_gather(torch.tensor([int(is_bad)]), world)
    return tensor_name if any(int(flag) for flag in flags) else None
