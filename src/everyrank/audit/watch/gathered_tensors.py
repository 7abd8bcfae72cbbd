"""Tracks tensors that are computed from results of all_gather, through which no gradient flows to other ranks.

Features that were detached first (`detach`, `no_grad`) may be intended as targets. If a rank puts its local features,
with their gradient, back into the gathered ones, then the gradient of the other features is missing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from everyrank.audit.watch.recorder import tensors
from everyrank.audit.watch.source_location import calling_codes

__all__ = ["GatherTracker", "Gathered"]

_TENSOR: Any = torch.Tensor
_DETACHING_FUNCTIONS = {torch.detach, _TENSOR.detach, _TENSOR.data.__get__}
_CONCATENATIONS = {torch.cat, torch.concat, torch.stack, torch.vstack, torch.Tensor.__setitem__}


@dataclasses.dataclass(frozen=True)
class Gathered:
    """A tensor that is computed from the result of an all_gather.

    line      the line of the all_gather
    sources   ids of the local features before they were detached; empty if they were not detached
    """

    tensor: Any
    line: str
    sources: frozenset[int] = frozenset()


class GatherTracker:
    """The gathered tensors since the last backward. References to them are kept, so that no id is reused."""

    def __init__(self) -> None:
        self.gathered: dict[int, Gathered] = {}
        self.detached: dict[int, tuple[Any, Any]] = {}  # a tensor without a gradient, and the one that has it

    def forget(self) -> None:
        """Release all tensors after a backward."""
        self.gathered, self.detached = {}, {}

    def add_gather(self, sent: Any, out: Any, line: str) -> None:
        """Record the result of all_gather of a tensor."""
        if not isinstance(sent, torch.Tensor) or sent.dim() < 2:
            return
        is_detached = id(sent) in self.detached or (sent.grad_fn is not None and not torch.is_grad_enabled())
        if is_detached and _is_in_autograd_function():
            return  # the autograd.Function defines a backward
        if not is_detached and not (sent.requires_grad and torch.is_grad_enabled()):
            return
        source = self.detached.get(id(sent), (sent, sent))[1]
        sources = frozenset([id(source)] if is_detached else [])
        self.detached |= {id(sent): (sent, source)} if is_detached else {}  # held
        self.gathered |= {id(t): Gathered(t, line, sources) for t in tensors(out) if not t.requires_grad}

    def track_function(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Track the results of a torch function of gathered or detached tensors."""
        if func in _DETACHING_FUNCTIONS:
            if args[0].dim() > 1 and args[0].grad_fn is not None and isinstance(out, torch.Tensor):
                self.detached[id(out)] = out, args[0]
            return
        if not self.gathered and not self.detached:
            return
        inputs = list(tensors((args, kwargs)))
        results = [args[0]] if func is torch.Tensor.__setitem__ else list(tensors(out))
        gathered_inputs = [self.gathered[id(tensor)] for tensor in inputs if id(tensor) in self.gathered]
        if gathered_inputs:
            sources = frozenset[int]().union(*(tensor.sources for tensor in gathered_inputs))
            contains_source = func in _CONCATENATIONS and sources & {id(tensor) for tensor in inputs}
            if contains_source or not all(tensor.sources for tensor in gathered_inputs):
                sources = frozenset()
            self.gathered |= {id(tensor): Gathered(tensor, gathered_inputs[0].line, sources) for tensor in results}
        elif len(inputs) == 1 and id(inputs[0]) in self.detached:
            self.detached |= {id(tensor): (tensor, self.detached[id(inputs[0])][1]) for tensor in results}


def _is_in_autograd_function() -> bool:
    """Whether the forward of an autograd.Function is on the stack. `apply`, which calls it, is in C from torch 2.15."""
    forwards, classes = set(), [torch.autograd.Function]
    while classes:
        function = classes.pop()
        classes += function.__subclasses__()
        forwards.add(getattr(function.forward, "__code__", None))
    return any(code in forwards for code in calling_codes())
