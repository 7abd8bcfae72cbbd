"""Checks that ranks which reduce their gradients together have gradients of the same parameters.

A mixture may call an expert only if a sample of the rank has chosen it, and a model may skip layers. Some wrappers
reduce only the gradients that a rank has. Then the gradient of one parameter would be added to that of another one on
another rank, silently if both have the same size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence

import torch
from torch import nn

from everyrank.errors import UnsupportedLayoutError, WorkloadError
from everyrank.layout import Layout
from everyrank.parallel.mesh import local_tensor
from everyrank.world import SameValue, World

__all__ = ["SameGradients"]


class SameGradients:
    """Compares the parameters without a gradient over `ranks` (None: all). Every rank makes the object.

    Its methods raise `UnsupportedLayoutError` if all ranks find the difference, else `WorkloadError`.
    """

    def __init__(
        self, named: Mapping[str, nn.Parameter], layout: Layout, world: World, ranks: Sequence[int] | None = None
    ) -> None:
        self.named = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self.layout, self.rank, self.unused = layout, world.rank, SameValue(world, ranks)

    def check(self) -> None:
        """Compare the parameters that have no gradient now, after the last backward of an update."""
        self._compare([name for name, parameter in self.named.items() if parameter.grad is None])

    @contextlib.contextmanager
    def check_backward(self) -> Generator[None]:
        """Compare the parameters whose gradient the block does not change: a forward and backward that reduces."""
        before = self._versions()
        yield
        versions = zip(self.named, before, self._versions(), strict=True)
        self._compare([name for name, old, new in versions if old == new])

    @torch.no_grad()
    def _versions(self) -> list[tuple[int, int] | None]:
        gradients = [parameter.grad for parameter in self.named.values()]
        return [None if gradient is None else (id(gradient), local_tensor(gradient)._version) for gradient in gradients]

    def _compare(self, unused: Sequence[str]) -> None:
        values, is_everywhere = self.unused.differences("\n".join(unused))
        if not values:
            return
        sets = {rank: set(value.split("\n")) for rank, value in values.items()}
        other = next(rank for rank in sets if sets[rank] != sets[self.rank])
        name = min((sets[self.rank] ^ sets[other]) - {""})
        without, having = (self.rank, other) if name in sets[self.rank] else (other, self.rank)
        message = (
            f"layout {self.layout}: parameter {name} has a gradient on rank {having}, but not on rank {without}, and "
            "ranks can only add up gradients that all of them have; let each rank use it (add 0 * its output), or use "
            "--layout ddp:find_unused=true"
        )
        raise (UnsupportedLayoutError if is_everywhere else WorkloadError)(message)
