"""Reads FullyShardedDataParallel (FSDP1), whose flat parameters hold several parameters of the model, split over ranks.

A flat parameter is a leaf: its gradient of one backward, which a hook gets before it is reduced, is whole. The gradient
that steps is this rank's shard of it. Both are given by the names of the model's own parameters.
"""

# These are private parts of torch.
# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

__all__ = ["WRAPPERS", "FlatShards", "name_in_model"]

WRAPPERS = (
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_orig_mod",
    "module",
    "_forward_module",
    "_original_module",
)
"""Names of the modules inside wrappers of torch and of Lightning Fabric."""


def name_in_model(name: str) -> str:
    """The name of a parameter or module without those of the wrappers around it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


class FlatShards:
    """The flat parameters of the models that were called."""

    def __init__(self) -> None:
        self.names: dict[int, list[str]] = {}  # by id of a flat parameter: the names of its parts
        self.handles: dict[int, Any] = {}  # by id of a flat parameter
        self.originals: dict[
            int, tuple[Any, int]
        ] = {}  # with use_orig_params: id -> flat parameter, number of the part

    def find(self, root: Any) -> list[Any]:
        """Remember the flat parameters of a model; returns those that are new."""
        shards: list[Any] = []
        for name, module in root.named_modules():
            handle = getattr(module, "_handle", None) if type(module).__name__ == "FullyShardedDataParallel" else None
            if handle is None or id(handle.flat_param) in self.handles:
                continue
            flat = handle.flat_param
            self.names[id(flat)] = [name_in_model(f"{name}.{part}".lstrip(".")) for part in flat._fqns]
            self.handles[id(flat)] = handle
            shards.append(flat)
            for number, original in enumerate(flat._params or ()):
                self.originals[id(original)] = flat, number
        return shards

    def holds(self, parameter: Any) -> bool:
        """Whether the parameter is flat, or a part of a flat one."""
        return id(parameter) in self.handles or id(parameter) in self.originals

    def parts(self, flat: Any, grad: Any) -> Iterable[tuple[str, Any]]:
        """Names and values of the parts of a whole gradient, shape (numel,)."""
        offsets = self.handles[id(flat)]._get_flat_param_offsets()
        real = [where for where, pads in zip(offsets, flat._is_padding_mask, strict=True) if not pads]
        for name, (start, end) in zip(self.names[id(flat)], real, strict=True):
            yield name, grad[start : end + 1]

    def shards(self, parameter: Any, sample: Callable[[Any, int, int], np.ndarray]) -> dict[str, np.ndarray]:
        """Samples of this rank's shard of the gradient that steps, by name.

        `sample(values, start, numel)` places the values from `start` on in a tensor of `numel` elements.
        """
        flat, number = self.originals.get(id(parameter), (parameter, None))
        if number is None:
            return self._of_flat(flat, parameter.grad, sample) if parameter.grad is not None else {}
        shard, name = flat._shard_param_infos[number], self.names[id(flat)][number]
        if shard.in_shard and parameter.grad is None:
            return {}
        values = parameter.grad.reshape(-1) if shard.in_shard else torch.zeros(0)
        return {name: sample(values, shard.intra_param_start_idx or 0, flat._numels[number])}

    def carried(self, sample: Callable[[Any, int, int], np.ndarray]) -> dict[str, np.ndarray]:
        """Samples of the shards that .grad has before a backward."""
        samples: dict[str, np.ndarray] = {}
        for handle in self.handles.values():
            flat = handle.flat_param
            grad = flat.grad if flat.grad is not None else getattr(flat, "_saved_grad_shard", None)
            if grad is not None and grad.numel() == flat._sharded_size.numel():
                samples |= self._of_flat(flat, grad, sample)
        return samples

    def _of_flat(self, flat: Any, grad: Any, sample: Callable[[Any, int, int], np.ndarray]) -> dict[str, np.ndarray]:
        samples: dict[str, np.ndarray] = {}
        for name, numel, shard in zip(self.names[id(flat)], flat._numels, flat._shard_param_infos, strict=True):
            start = shard.offset_in_shard or 0
            values = grad[start : start + shard.numel_in_shard] if shard.in_shard else torch.zeros(0)
            samples[name] = sample(values, shard.intra_param_start_idx or 0, numel)
        return samples
