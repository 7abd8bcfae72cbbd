"""Tracks random numbers that a training step draws for its samples and feeds into the model: noise, timesteps.

Draws of the step are followed to the model's inputs as long as they have a row for each sample. Ranks may draw the same
numbers if each rank takes different rows. Draws inside the model count if they have a row for each sample. Draws before
the first update generate data and weights, and do not count.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from everyrank.audit.events import RandomDraw
from everyrank.audit.watch.recorder import Recorder, checksum, tensors
from everyrank.audit.watch.source_location import user_line

__all__ = ["DrawTracker"]

_DRAWS = {
    *(torch.rand, torch.randn, torch.randint, torch.rand_like, torch.randn_like, torch.randint_like),
    *(torch.normal, torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.normal_, torch.Tensor.uniform_),
    *(torch.Tensor.bernoulli_, torch.Tensor.random_, torch.Tensor.exponential_),
}
_SELECTIONS = {  # functions that select rows, which is not noise
    *(torch.Tensor.__getitem__, torch.gather, torch.Tensor.gather, torch.index_select, torch.Tensor.index_select),
    *(torch.take, torch.Tensor.take, torch.take_along_dim, torch.Tensor.unbind, torch.Tensor.__iter__, torch.unbind),
}
_MAX_ELEMENTS = 2048  # of a draw to compare


class DrawTracker:
    """The draws since the last backward. References to the tensors are kept, so that no id is reused."""

    def __init__(self) -> None:
        self.tracked: dict[int, tuple[Any, frozenset[RandomDraw]]] = {}  # drawn tensors, and those computed from them
        self.forward_draws: list[RandomDraw] = []  # draws of the current forward
        self.forward_lines: set[str] = set()  # lines of all of them, whatever their shape
        self.num_samples = 0  # of the current forward
        self.shapes: set[Any] = set()  # of the parameters: weight noise does not count

    def forget(self) -> None:
        """Release all tensors after a backward."""
        self.tracked = {}

    def enter_forward(self, inputs: Any, num_samples: int, shapes: set[Any]) -> list[RandomDraw]:
        """Start a forward, and return the draws for its samples that are among its inputs."""
        self.forward_draws, self.num_samples, self.shapes = [], num_samples, shapes
        self.forward_lines = set()
        tracked_inputs = [self.tracked[id(tensor)] for tensor in tensors(inputs) if id(tensor) in self.tracked]
        input_draws = [draws for tensor, draws in tracked_inputs if tensor.shape[0] == num_samples > 1]
        return sorted(frozenset[RandomDraw]().union(*input_draws))

    def track_function(self, recorder: Recorder, func: Any, args: Any, kwargs: Any, out: Any, is_inside: bool) -> None:
        """Track a torch function that draws, or that computes from drawn tensors."""
        is_drawn = func in _DRAWS
        if not isinstance(out, torch.Tensor) or not out.dim() or not (is_drawn or self.tracked):
            return
        if is_drawn and 0 < recorder.update < recorder.settings.updates:
            draw = user_line(), _checksum(recorder, out), _seed(kwargs.get("generator"))
            is_of_samples = out.shape[0] == self.num_samples > 1 and tuple(out.shape) not in self.shapes
            if is_inside:
                self.forward_lines.add(draw[0])
            if not is_inside:
                self.tracked[id(out)] = out, frozenset([draw])
            elif is_of_samples and torch.is_grad_enabled():
                self.forward_draws.append(draw)
        elif not is_drawn and not is_inside and func not in _SELECTIONS:
            drawn_inputs = [
                self.tracked[id(tensor)] for tensor in tensors((args, kwargs)) if id(tensor) in self.tracked
            ]
            if drawn_inputs and all(t.shape[0] == out.shape[0] and t.numel() <= out.numel() for t, _ in drawn_inputs):
                self.tracked[id(out)] = out, frozenset[RandomDraw]().union(*(draw for _, draw in drawn_inputs))


def _checksum(recorder: Recorder, out: Any) -> int:
    with recorder.muted():
        return zlib.crc32(repr((tuple(out.shape), checksum(out.flatten()[:_MAX_ELEMENTS]))).encode())


def _seed(generator: Any) -> int:
    return (generator or torch.default_generator).initial_seed()
