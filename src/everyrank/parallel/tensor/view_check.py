"""Detects views that are wrong on split features.

With n ranks, a colwise layer has 1/n of its features on each rank. `view(B, T, 4, -1)` then returns four heads of 1/n
of their width, which runs but is wrong. The check compares the last dimension of such a view with that of a view of all
features, and refuses fused features that are split.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from everyrank.errors import UnsupportedLayoutError

__all__ = ["ViewCheck"]

_VIEWS = ("view", "reshape", "unflatten")
_CUTS = ("chunk", "split", "tensor_split", "split_with_sizes")


class ViewCheck(TorchFunctionMode):
    """While entered, checks the use of outputs of split layers.

    `layers` are the colwise layers by name, `degree` the number of ranks they are split over.
    Raises `UnsupportedLayoutError`.
    """

    def __init__(self, layers: Mapping[str, nn.Module], degree: int) -> None:
        super().__init__()
        self.degree = degree
        self.outputs: dict[int, tuple[Tensor, str]] = {}
        self.hooks = [
            layer.register_forward_hook(functools.partial(self._remember, name)) for name, layer in layers.items()
        ]

    def _remember(self, name: str, _: nn.Module, __: Any, output: Tensor) -> None:
        self.outputs[id(output)] = output, name  # the reference keeps its id from being reused

    def end(self) -> None:
        """Forget the outputs and stop checking."""
        self.outputs.clear()
        for hook in self.hooks:
            hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        known = self.outputs.get(id(args[0])) if args else None
        if known is None or name not in (*_VIEWS, *_CUTS):
            return func(*args, **kwargs)
        local, layer = known
        if name in _CUTS and self._cuts_features(local, args, kwargs):
            raise UnsupportedLayoutError(
                f"tensor_plan: {layer} is colwise, but its output is cut into pieces ({name}): fused features (query, "
                "key and value in one) cannot be split by columns; use a layer for each"
            )
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            raise UnsupportedLayoutError(self._text(layer, local, name, str(error).splitlines()[0])) from error
        whole = torch.empty((*local.shape[:-1], local.shape[-1] * self.degree), device="meta")
        try:
            expected = func(whole, *args[1:], **kwargs)
        except RuntimeError:
            raise UnsupportedLayoutError(self._text(layer, local, name, "all features do not fit it")) from None
        if isinstance(result, Tensor) and result.dim() > local.dim() and result.shape[-1] != expected.shape[-1]:
            difference = f"heads {result.shape[-1]} wide instead of {expected.shape[-1]}"
            raise UnsupportedLayoutError(self._text(layer, local, name, difference))
        return result

    def _cuts_features(self, local: Tensor, args: Any, kwargs: Any) -> bool:
        dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
        return dim in (-1, local.dim() - 1)

    def _text(self, layer: str, local: Tensor, name: str, difference: str) -> str:
        return (
            f"tensor_plan: {layer} has {local.shape[-1]} of its {local.shape[-1] * self.degree} features here, and the "
            f"model's {name} does not follow ({difference}): let the number of heads be -1 and fix their width, "
            "for example view(B, T, -1, head_width)"
        )
