"""Tracks random numbers that a training step draws for its samples and that go into the model: noise, timesteps.

Draws of the step are followed to the model's inputs as long as they have a row for each sample. A rank that draws for
all ranks and takes its own rows is right to draw the same numbers. Draws inside the model count if they have a row for
each sample. Draws before the first update make data and weights, and do not count.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from everyrank.audit.events import RandomDraw
from everyrank.audit.watch.place import where
from everyrank.audit.watch.recorder import Recorder, checksum, tensors

__all__ = ["Noise"]

_DRAWS = {
    *(torch.rand, torch.randn, torch.randint, torch.rand_like, torch.randn_like, torch.randint_like),
    *(torch.normal, torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.normal_, torch.Tensor.uniform_),
    *(torch.Tensor.bernoulli_, torch.Tensor.random_, torch.Tensor.exponential_),
}
_CHOOSES = {  # functions that select rows, which is not noise
    *(torch.Tensor.__getitem__, torch.gather, torch.Tensor.gather, torch.index_select, torch.Tensor.index_select),
    *(torch.take, torch.Tensor.take, torch.take_along_dim, torch.Tensor.unbind, torch.Tensor.__iter__, torch.unbind),
}
_MOST = 2048  # elements of a draw to compare


class Noise:
    """The draws since the last backward. Tensors are held, so that no id is reused."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, frozenset[RandomDraw]]] = {}  # drawn tensors, and those computed from them
        self.inside: list[RandomDraw] = []  # draws of the current forward
        self.inside_at: set[str] = set()  # lines of all of them, whatever their shape
        self.num_samples = 0  # of the current forward
        self.shapes: set[Any] = set()  # of the parameters: weight noise does not count

    def forget(self) -> None:
        """Let all tensors go, after a backward."""
        self.known = {}

    def entering(self, inputs: Any, num_samples: int, shapes: set[Any]) -> list[RandomDraw]:
        """The draws for its samples that go into a forward, which begins now."""
        self.inside, self.num_samples, self.shapes = [], num_samples, shapes
        self.inside_at = set()
        known = [self.known[id(tensor)] for tensor in tensors(inputs) if id(tensor) in self.known]
        drawn = [draws for tensor, draws in known if tensor.shape[0] == num_samples > 1]
        return sorted(frozenset[RandomDraw]().union(*drawn))

    def called(self, recorder: Recorder, func: Any, args: Any, kwargs: Any, out: Any, is_inside: bool) -> None:
        """Track a torch function that draws, or that computes from drawn tensors."""
        is_drawn = func in _DRAWS
        if not isinstance(out, torch.Tensor) or not out.dim() or not (is_drawn or self.known):
            return
        if is_drawn and 0 < recorder.update < recorder.settings.updates:
            drawn = where(), _checksum(recorder, out), _seed(kwargs.get("generator"))
            is_of_samples = out.shape[0] == self.num_samples > 1 and tuple(out.shape) not in self.shapes
            if is_inside:
                self.inside_at.add(drawn[0])
            if not is_inside:
                self.known[id(out)] = out, frozenset([drawn])
            elif is_of_samples and torch.is_grad_enabled():
                self.inside.append(drawn)
        elif not is_drawn and not is_inside and func not in _CHOOSES:
            given = [self.known[id(tensor)] for tensor in tensors((args, kwargs)) if id(tensor) in self.known]
            if given and all(t.shape[0] == out.shape[0] and t.numel() <= out.numel() for t, _ in given):
                self.known[id(out)] = out, frozenset[RandomDraw]().union(*(drawn for _, drawn in given))


def _checksum(recorder: Recorder, out: Any) -> int:
    with recorder.muted():
        return zlib.crc32(repr((tuple(out.shape), checksum(out.flatten()[:_MOST]))).encode())


def _seed(generator: Any) -> int:
    return (generator or torch.default_generator).initial_seed()
