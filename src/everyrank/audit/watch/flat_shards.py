"""Reads FullyShardedDataParallel (FSDP1), whose flat parameters contain several parameters and are split over ranks.

A flat parameter is a leaf of the graph. A hook gets its whole gradient of one backward before it is reduced. The
gradient of the optimizer step is this rank's shard of it. Both are returned by the names of the model's parameters.
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
"""Attributes of wrappers of torch and Lightning Fabric that contain the wrapped module."""


def name_in_model(name: str) -> str:
    """The name of a parameter or module without the names of the wrappers around it."""
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPERS)


class FlatShards:
    """The flat parameters of the models that the script calls."""

    def __init__(self) -> None:
        self.names: dict[int, list[str]] = {}  # by id of a flat parameter: the names of its parts
        self.handles: dict[int, Any] = {}  # by id of a flat parameter
        self.originals: dict[
            int, tuple[Any, int]
        ] = {}  # with use_orig_params: id -> flat parameter, number of the part

    def add_model(self, root: Any) -> list[Any]:
        """Add the flat parameters of a model, and return the new ones."""
        new_flat_parameters: list[Any] = []
        for name, module in root.named_modules():
            handle = getattr(module, "_handle", None) if type(module).__name__ == "FullyShardedDataParallel" else None
            if handle is None or id(handle.flat_param) in self.handles:
                continue
            flat = handle.flat_param
            self.names[id(flat)] = [name_in_model(f"{name}.{fqn}".lstrip(".")) for fqn in flat._fqns]
            self.handles[id(flat)] = handle
            new_flat_parameters.append(flat)
            for index, original in enumerate(flat._params or ()):
                self.originals[id(original)] = flat, index
        return new_flat_parameters

    def has_parameter(self, parameter: Any) -> bool:
        """Whether a parameter is flat, or is contained in a flat parameter."""
        return id(parameter) in self.handles or id(parameter) in self.originals

    def split_gradient(self, flat: Any, grad: Any) -> Iterable[tuple[str, Any]]:
        """Split the whole gradient of a flat parameter, shape (numel,), into (name, gradient) of its parameters."""
        offsets = self.handles[id(flat)]._get_flat_param_offsets()
        offsets_without_padding = [
            offset for offset, pads in zip(offsets, flat._is_padding_mask, strict=True) if not pads
        ]
        for name, (start, end) in zip(self.names[id(flat)], offsets_without_padding, strict=True):
            yield name, grad[start : end + 1]

    def shard_samples(self, parameter: Any, sample: Callable[[Any, int, int], np.ndarray]) -> dict[str, np.ndarray]:
        """Samples of this rank's shard of the gradient of the step, by name.

        `sample(values, start, numel)` samples a tensor of `numel` elements that has `values` from `start` on.
        """
        flat, index = self.originals.get(id(parameter), (parameter, None))
        if index is None:
            return self._samples_of_flat(flat, parameter.grad, sample) if parameter.grad is not None else {}
        shard, name = flat._shard_param_infos[index], self.names[id(flat)][index]
        if shard.in_shard and parameter.grad is None:
            return {}
        values = parameter.grad.reshape(-1) if shard.in_shard else torch.zeros(0)
        return {name: sample(values, shard.intra_param_start_idx or 0, flat._numels[index])}

    def carried_samples(self, sample: Callable[[Any, int, int], np.ndarray]) -> dict[str, np.ndarray]:
        """Samples of the shards in .grad before a backward."""
        samples: dict[str, np.ndarray] = {}
        for handle in self.handles.values():
            flat = handle.flat_param
            grad = flat.grad if flat.grad is not None else getattr(flat, "_saved_grad_shard", None)
            if grad is not None and grad.numel() == flat._sharded_size.numel():
                samples |= self._samples_of_flat(flat, grad, sample)
        return samples

    def _samples_of_flat(
        self, flat: Any, grad: Any, sample: Callable[[Any, int, int], np.ndarray]
    ) -> dict[str, np.ndarray]:
        samples: dict[str, np.ndarray] = {}
        for name, numel, shard in zip(self.names[id(flat)], flat._numels, flat._shard_param_infos, strict=True):
            start = shard.offset_in_shard or 0
            values = grad[start : start + shard.numel_in_shard] if shard.in_shard else torch.zeros(0)
            samples[name] = sample(values, shard.intra_param_start_idx or 0, numel)
        return samples
