"""Tracks numbers of an evaluation that are not means over samples: ratios of counts, and exponentials of means.

They are tracked until the next training forward, by tensor, or by exact value if they became a Python number.
"""

from __future__ import annotations

from typing import Any

import torch

from everyrank.audit.events import ReduceResult
from everyrank.audit.watch.recorder import Recorder

__all__ = ["RatioTracker"]

_TENSOR: Any = torch.Tensor
_DIVISIONS = {torch.div, torch.true_divide, _TENSOR.div, _TENSOR.div_, _TENSOR.true_divide, _TENSOR.__truediv__}
_EXPONENTIALS = {torch.exp, _TENSOR.exp, _TENSOR.exp_}
_FACTORS = {torch.mul, _TENSOR.mul, _TENSOR.mul_, _TENSOR.__mul__, _TENSOR.__rmul__}
_COPIES = {
    *(_TENSOR.clone, _TENSOR.detach, _TENSOR.to, _TENSOR.float, _TENSOR.double, _TENSOR.cpu, _TENSOR.cuda),
    *(_TENSOR.reshape, _TENSOR.view, _TENSOR.unsqueeze, _TENSOR.squeeze, _TENSOR.contiguous),
}


class RatioTracker:
    """The numbers of the current evaluation. References to the tensors are kept, so that no id is reused."""

    def __init__(self) -> None:
        self.tracked: dict[int, tuple[Any, ReduceResult]] = {}

    def forget(self) -> None:
        """Release all tensors, because training continues."""
        self.tracked = {}

    def track_function(self, recorder: Recorder, func: Any, args: Any, out: Any) -> None:
        """Track a torch function that returns one number."""
        is_number = isinstance(out, torch.Tensor) and out.numel() == 1 and not out.requires_grad
        if not is_number or func not in _TRACKED:
            return
        with recorder.muted():
            result = self._result(func, args, float(out))
        if result is not None:
            self.tracked[id(out)] = out, result
        else:
            self.tracked.pop(id(out), None)  # it was changed in place

    def _result(self, func: Any, args: Any, value: float) -> ReduceResult | None:
        if func in _EXPONENTIALS:
            return ReduceResult(value, is_exponential=True)
        if func in _DIVISIONS:
            denominator = float(args[1])
            return ReduceResult(value, value * denominator, denominator)
        _, tracked = self.tracked.get(id(args[0]), (None, None))
        if tracked is None or func not in _FACTORS:
            return tracked
        if tracked.denominator is None or not isinstance(args[1], int | float):
            return None
        return ReduceResult(value, value * tracked.denominator, tracked.denominator, tracked.factor * args[1])

    def result_of(self, tensor: Any) -> ReduceResult:
        """A number that is sent to the other ranks, with its ratio or exponential if that is known."""
        if id(tensor) in self.tracked:
            return self.tracked[id(tensor)][1]
        value = float(tensor)
        equal = [
            tracked
            for _, tracked in self.tracked.values()
            if value in (tracked.value, float(torch.tensor(tracked.value)))
        ]
        return equal[-1] if equal and value not in (0.0, 1.0) else ReduceResult(value)


_TRACKED = _DIVISIONS | _EXPONENTIALS | _FACTORS | _COPIES
