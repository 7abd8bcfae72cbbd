"""Counts of tokens for each expert, on fake tensors, which have no values.

A mixture of experts counts the tokens of each expert and splits its rows by these numbers. Fake tensors do not
have them, but their sum is known: it is the number of indices that were counted. So tokens are assumed to be spread
evenly. A real router does not spread them evenly, so a rank may get more; without dropped tokens, at most all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["EvenCounts"]

_SAME_SUM = frozenset(
    (
        *("sum", "view", "_unsafe_view", "reshape", "clone", "detach", "alias", "_to_copy", "contiguous"),
        *("unsqueeze", "squeeze", "permute", "transpose", "t"),
    )
)
_COUNTED = (torch.int64, torch.int32, torch.float32, torch.bool)


class EvenCounts:
    """The sums of tensors of counts, tracked through the operators that compute them."""

    def __init__(self) -> None:
        self.sums: Any = WeakTensorKeyDictionary()

    def of_scalar(self, tensor: Tensor) -> int:
        """Return the value of a count; 1 if unknown."""
        return int(self.sums.get(tensor, 1))

    def note(self, func: Any, args: Any, result: Any) -> None:
        """Follow an operator from indices to counts, and from counts to counts."""
        space, name = func._schema.name.split("::")
        if space == "aten" and name in ("scatter", "scatter_", "scatter_add", "scatter_add_", "histc", "bincount"):
            counted = args[2] if name.startswith("scatter") else args[0]
            self._keep(result, counted.numel())
            if name.endswith("_"):
                self._keep(args[0], counted.numel())
        elif name == "eq" and isinstance(args[1], Tensor) and args[0].shape[-1:] == (1,) and args[1].dim() == 1:
            self._keep(result, args[0].numel())  # each index is one of the kinds: torch's one_hot
        elif name in ("alltoall_base_", "all_to_all_single"):  # a rank is assumed to receive as many tokens as it sends
            tensors = [value for value in args if isinstance(value, Tensor)]
            known = [self.sums[tensor] for tensor in tensors if tensor in self.sums]
            for tensor in tensors if known else ():
                self._keep(tensor, known[0])
        elif name in ("stack", "cat"):
            if all(tensor in self.sums for tensor in args[0]):
                self._keep(result, sum(self.sums[tensor] for tensor in args[0]))
        elif args and isinstance(args[0], Tensor) and args[0] in self.sums:
            self._pass_on(name, self.sums[args[0]], args, result)

    def _pass_on(self, name: str, total: int, args: Any, result: Any) -> None:
        if name in _SAME_SUM:
            self._keep(result, total)
        elif name == "select":
            size, index = args[0].shape[args[1]], args[2] % args[0].shape[args[1]]
            self._keep(result, total * (index + 1) // size - total * index // size)
        elif name == "unbind":
            size = len(result)
            for index, count in enumerate(result):
                self._keep(count, total * (index + 1) // size - total * index // size)

    def _keep(self, tensor: Any, total: int) -> None:
        if isinstance(tensor, Tensor) and tensor.dtype in _COUNTED:
            self.sums[tensor] = total
