"""Random numbers that a training step draws for its samples, and that go into its model: noise, timesteps, negatives.

Drawn in the step itself they are followed to the model's inputs, as long as each sample keeps its own: what a rank cuts
its part out of, all ranks draw alike, and rightly so. Drawn inside the model they have as many rows as there are
samples. Draws before the first update are left out: they make data and weights.
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
_CHOOSES = {  # rows of something: which of them is no noise
    *(torch.Tensor.__getitem__, torch.gather, torch.Tensor.gather, torch.index_select, torch.Tensor.index_select),
    *(torch.take, torch.Tensor.take, torch.take_along_dim, torch.Tensor.unbind, torch.Tensor.__iter__, torch.unbind),
}
_MOST = 2048  # elements of a draw that are compared


class Noise:
    """Since the last backward; tensors are held, so that ids stay theirs."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, frozenset[RandomDraw]]] = {}  # what was drawn, and what is computed of it
        self.inside: list[RandomDraw] = []  # by the model whose forward is going on
        self.num_samples = 0  # of it
        self.shapes: set[Any] = set()  # of its parameters: noise of these is another thing

    def forget(self) -> None:
        """Let all tensors go, after a backward."""
        self.known = {}

    def entering(self, inputs: Any, num_samples: int, shapes: set[Any]) -> list[RandomDraw]:
        """A forward begins; what has been drawn for its samples, and goes into it."""
        self.inside, self.num_samples, self.shapes = [], num_samples, shapes
        held = [self.known[id(tensor)] for tensor in tensors(inputs) if id(tensor) in self.known]
        return sorted(frozenset[RandomDraw]().union(*(drawn for one, drawn in held if one.shape[0] == num_samples > 1)))

    def called(self, recorder: Recorder, func: Any, args: Any, kwargs: Any, out: Any, is_inside: bool) -> None:
        """A torch function: one that draws, or that computes something of what was drawn."""
        is_drawn = func in _DRAWS
        if not isinstance(out, torch.Tensor) or not out.dim() or not (is_drawn or self.known):
            return
        if is_drawn and 0 < recorder.update < recorder.settings.updates:
            drawn = where(), _checksum(recorder, out), _seed(kwargs.get("generator"))
            is_of_samples = out.shape[0] == self.num_samples > 1 and tuple(out.shape) not in self.shapes
            if not is_inside:
                self.known[id(out)] = out, frozenset([drawn])
            elif is_of_samples and torch.is_grad_enabled():
                self.inside.append(drawn)
        elif not is_drawn and not is_inside and func not in _CHOOSES:
            given = [self.known[id(tensor)] for tensor in tensors((args, kwargs)) if id(tensor) in self.known]
            if given and all(one.shape[0] == out.shape[0] and one.numel() <= out.numel() for one, _ in given):
                self.known[id(out)] = out, frozenset[RandomDraw]().union(*(drawn for _, drawn in given))


def _checksum(recorder: Recorder, out: Any) -> int:
    with recorder.muted():
        return zlib.crc32(repr((tuple(out.shape), checksum(out.flatten()[:_MOST]))).encode())


def _seed(generator: Any) -> int:
    return (generator or torch.default_generator).initial_seed()
