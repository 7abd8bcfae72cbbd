"""Compute with a model of which each rank has parts as if it were whole, and hold one whole parameter at a time."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from everyrank.data.loader import map_tensors
from everyrank.parallel.full_state import without_advice
from everyrank.parallel.mesh import full_tensor

__all__ = ["GatherOnUse"]

_OF_THE_SHAPE = ("shape", "dtype", "ndim", "requires_grad", "size", "dim", "numel", "is_floating_point")


class GatherOnUse(TorchFunctionMode):
    """While it is entered, `whole`, which has shapes alone (the meta device), computes with the numbers of `parts`.

    Each function that takes a parameter or buffer of `whole` gets what the ranks have of it, put together for this
    call: a collective, so every rank has to go through the model in the same order. Without gradients.
    """

    def __init__(self, whole: nn.Module, parts: nn.Module) -> None:
        super().__init__()
        own = {**dict(parts.named_parameters(remove_duplicate=False)), **dict(parts.named_buffers())}
        named = (*whole.named_parameters(remove_duplicate=False), *whole.named_buffers())
        self.parts = {id(tensor): own[name] for name, tensor in named}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name
        if name in _OF_THE_SHAPE:
            return func(*args, **(kwargs or {}))
        return func(*map_tensors(tuple(args), self._whole), **map_tensors(kwargs or {}, self._whole))

    def _whole(self, tensor: Tensor) -> Tensor:
        part = self.parts.get(id(tensor))
        if part is None:
            return tensor
        with without_advice():
            return full_tensor(part.detach())
