"""Notice a view that means something else on split features.

A colwise layer has an n-th of its features on each rank. `view(B, T, 4, -1)` then gives four heads of an n-th of their
width: a training that runs, and is another one. Where the shape of such a view, computed for all features, has another
last dimension, or where fused features are cut into pieces, the plan and the model do not fit.
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
    """Looks, while it is entered, at what is done with the outputs of split layers.

    `layers` are the colwise ones by name, `degree` the number of ranks they are split over.
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
        self.outputs[id(output)] = output, name  # kept, so that its id stays its own

    def end(self) -> None:
        """Forget the outputs, and look no more."""
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
