"""Finds the first tensor that is NaN or infinite, after a bad loss or after the last update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from everyrank.data import Batch
from everyrank.data.loader import map_tensors
from everyrank.errors import NotFiniteError
from everyrank.parallel.loss import evaluate_batch
from everyrank.parallel.mesh import local_tensors
from everyrank.strategies import Prepared
from everyrank.world.collectives import all_gather

__all__ = ["check_finite", "first_bad_tensor", "first_of_all_ranks", "has_nonfinite", "nonfinite_loss_error"]

_LOSS_ITSELF = "the loss itself; parameters, input and all outputs are finite"
_FINITE_ON_RERUN = "none: the same forward pass is finite when run again"


def first_bad_tensor(prepared: Prepared, batches: Sequence[Batch], step: int) -> str:
    """Return the first tensor of this rank that is not finite: a parameter, the input, a module's output, or the loss.

    Runs the forward pass again, with the same weights, so that no step has to keep its outputs. A collective.
    """
    bad_outputs: list[str] = []
    losses: list[Tensor] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            if has_nonfinite(output):
                bad_outputs.append(f"output of {name or 'the model'} ({type(module).__name__})")

        return hook

    hooks = [module.register_forward_hook(watch(name)) for name, module in prepared.model.named_modules()]
    try:
        for batch in batches:
            with torch.no_grad(), contextlib.suppress(Exception):  # a metric of the user may fail on NaN
                losses.append(evaluate_batch(prepared.workload, prepared.predict(batch), batch)[0])
    finally:
        for hook in hooks:
            hook.remove()
    name = _bad_parameter(prepared)
    if name:
        cause = "the update before; lower the learning rate or set clip_norm" if step else "model() itself"
        return f"parameter {name}; caused by {cause}"
    if any(has_nonfinite(batch.input) for batch in batches):
        return "the input itself"
    return next(iter(bad_outputs), _LOSS_ITSELF if has_nonfinite(losses) else _FINITE_ON_RERUN)


def first_of_all_ranks(local_reason: str, prepared: Prepared) -> str:
    """Return the most specific reason of all ranks, the same on every rank. A collective."""
    return min(
        _of_all_ranks(local_reason, prepared), key=lambda text: (text == _FINITE_ON_RERUN, text == _LOSS_ITSELF)
    )  # the first of the most specific ones


def check_finite(prepared: Prepared, done: int) -> None:
    """Raise `NotFiniteError` on every rank where a parameter is not finite after `done` updates. A collective.

    After the last update, no further loss would show it.
    """
    parameter_name = next(filter(None, _of_all_ranks(_bad_parameter(prepared), prepared)), "")
    if parameter_name:
        message = (
            f"update {done - 1}: parameter {parameter_name} became infinite or NaN; "
            "lower the learning rate or set clip_norm"
        )
        raise NotFiniteError(
            message if done else f"parameter {parameter_name} is infinite or NaN; model() returned it so"
        )


def _bad_parameter(prepared: Prepared) -> str:
    """Return the name of the first parameter whose local part is not finite, "" without one."""
    named = prepared.model.named_parameters()
    return next((name for name, parameter in named if has_nonfinite(local_tensors([parameter])[0])), "")


def _of_all_ranks(text: str, prepared: Prepared) -> list[str]:
    """Return every rank's text. A collective."""
    rows = all_gather(torch.tensor(list(text.encode()), dtype=torch.uint8), prepared.world)
    return [bytes(row.tolist()).decode() for row in rows]


def has_nonfinite(value: Any) -> bool:
    """Return whether a tensor in `value` is not finite."""
    bad: list[bool] = []
    map_tensors(value, lambda tensor: bad.append(not bool(tensor.isfinite().all())) or tensor)
    return any(bad)


def nonfinite_loss_error(prepared: Prepared, step: int, loss: float) -> NotFiniteError:
    """Return the error for a loss that is not finite after its update."""
    parameter_name = _bad_parameter(prepared)
    where = f"parameter {parameter_name}" if parameter_name else "the loss itself"
    return NotFiniteError(f"update {step}: the loss is {loss}; first bad tensor: {where}")
