"""Entries of a model's state dict that are copies: writing into them does not change the model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from everyrank.parallel.mesh import local_tensor

__all__ = ["copied_entries", "loads_by_itself"]


def copied_entries(model: nn.Module) -> list[str]:
    """Return names of tensors that `state_dict` creates, such as extra state; `load_state_dict` has to load them."""
    members = [*model.parameters(), *model.buffers()]
    ids, storages = {id(tensor) for tensor in members}, {_storage(tensor) for tensor in members}
    return [
        name
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
        and id(value) not in ids
        and (_storage(value) == 0 or _storage(value) not in storages)
    ]


def _storage(tensor: Tensor) -> int:
    """Return the address of the tensor's memory; 0 on the meta device and for empty tensors."""
    return local_tensor(tensor).untyped_storage().data_ptr()


def loads_by_itself(module: nn.Module) -> bool:
    """Whether loading a state dict into a module does more than copy tensors."""
    kind: Any = type(module)
    hooks = (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks)  # pyright: ignore[reportPrivateUsage]
    user_classes = [base for base in kind.mro()[:-1] if not base.__module__.startswith("torch.nn.")]
    overrides_loading = any("_load_from_state_dict" in vars(base) for base in user_classes)
    return overrides_loading or kind.load_state_dict is not nn.Module.load_state_dict or any(hooks)
