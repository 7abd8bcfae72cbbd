"""Tracks tensors that are computed from results of all_gather, through which no gradient flows to the sending ranks.

Features that were detached first (`detach`, `no_grad`) may be intended as targets. If the rank puts its own features,
with their gradient, back among them, then the gradient of the others is missing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from everyrank.audit.watch.place import calling_codes
from everyrank.audit.watch.recorder import tensors

__all__ = ["Gathered", "Gathers"]

_TENSOR: Any = torch.Tensor
_DETACHES = {torch.detach, _TENSOR.detach, _TENSOR.data.__get__}
_JOINS = {torch.cat, torch.concat, torch.stack, torch.vstack, torch.Tensor.__setitem__}


@dataclasses.dataclass(frozen=True)
class Gathered:
    """A tensor that is computed from what all_gather gave.

    line      of the all_gather
    sources   ids of the sent features before they were detached; empty if they were not
    """

    tensor: Any
    line: str
    sources: frozenset[int] = frozenset()


class Gathers:
    """The tensors since the last backward. They are held, so that no id is reused."""

    def __init__(self) -> None:
        self.gathered: dict[int, Gathered] = {}
        self.detached: dict[int, tuple[Any, Any]] = {}  # a tensor without a gradient, and the one that has it

    def forget(self) -> None:
        """Let all tensors go, after a backward."""
        self.gathered, self.detached = {}, {}

    def gather_done(self, given: Any, out: Any, line: str) -> None:
        """Record the result of all_gather of a tensor."""
        if not isinstance(given, torch.Tensor) or given.dim() < 2:
            return
        is_cut_off = id(given) in self.detached or (given.grad_fn is not None and not torch.is_grad_enabled())
        if is_cut_off and _is_in_autograd_function():
            return  # which defines a backward
        if not is_cut_off and not (given.requires_grad and torch.is_grad_enabled()):
            return
        source = self.detached.get(id(given), (given, given))[1]
        sources = frozenset([id(source)] if is_cut_off else [])
        self.detached |= {id(given): (given, source)} if is_cut_off else {}  # held
        self.gathered |= {id(t): Gathered(t, line, sources) for t in tensors(out) if not t.requires_grad}

    def called(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Track the results of a torch function that is given such tensors."""
        if func in _DETACHES:
            if args[0].dim() > 1 and args[0].grad_fn is not None and isinstance(out, torch.Tensor):
                self.detached[id(out)] = out, args[0]
            return
        if not self.gathered and not self.detached:
            return
        given = list(tensors((args, kwargs)))
        made = [args[0]] if func is torch.Tensor.__setitem__ else list(tensors(out))
        known = [self.gathered[id(tensor)] for tensor in given if id(tensor) in self.gathered]
        if known:
            sources = frozenset[int]().union(*(tensor.sources for tensor in known))
            joins_source = func in _JOINS and sources & {id(tensor) for tensor in given}
            if joins_source or not all(tensor.sources for tensor in known):
                sources = frozenset()
            self.gathered |= {id(tensor): Gathered(tensor, known[0].line, sources) for tensor in made}
        elif len(given) == 1 and id(given[0]) in self.detached:
            self.detached |= {id(tensor): (tensor, self.detached[id(given[0])][1]) for tensor in made}


def _is_in_autograd_function() -> bool:
    """Whether the forward of an autograd.Function is on the stack: `apply`, which calls it, is C from torch 2.15 on."""
    forwards, classes = set(), [torch.autograd.Function]
    while classes:
        function = classes.pop()
        classes += function.__subclasses__()
        forwards.add(getattr(function.forward, "__code__", None))
    return any(code in forwards for code in calling_codes())
