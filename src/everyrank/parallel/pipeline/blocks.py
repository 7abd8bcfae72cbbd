"""Modules that replace blocks: RemoteBlock for blocks of other stages, BlockProxy while a stage runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn

from everyrank.errors import UnsupportedLayoutError

__all__ = [
    "BlockProxy",
    "RemoteBlock",
    "has_persistent_buffers",
    "held_elsewhere",
    "modules_outside",
    "release_tensors",
]


class RemoteBlock(nn.Module):
    """Replaces a block of another stage: it has the names and shapes of its tensors, but no memory.

    coordinate       coordinate of its ranks on the pipeline axis
    held_elsewhere   name of a tensor -> (shape, dtype)
    aliases          other names of the same tensors
    """

    def __init__(self, block: nn.Module, coordinate: int) -> None:
        super().__init__()
        self.coordinate = coordinate
        state = block.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        self.aliases = {name for name, tensor in state.items() if first.setdefault(id(tensor), name) != name}
        self.held_elsewhere = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}


def held_elsewhere(model: nn.Module) -> set[str]:
    """Return the names of parameters and buffers on other stages; tied ones once."""
    return {
        f"{block}.{name}"
        for block, absent in model.named_modules()
        if isinstance(absent, RemoteBlock)
        for name in absent.held_elsewhere
        if name not in absent.aliases
    }


class _RemoteParameters(dict[str, Any]):
    """Raises if the model accesses parameters of blocks in forward, because other stages have some of them."""

    def items(self) -> Any:
        raise UnsupportedLayoutError(
            "pipeline: the model looks at the parameters of its blocks in its forward pass, and other stages have some "
            "of them; move that into the blocks, or the optimizer"
        )


class BlockProxy(nn.Module):
    """Replaces a block while a stage runs."""

    def __init__(self, stages: Any, index: int) -> None:
        super().__init__()
        self.__dict__["_parameters"] = _RemoteParameters()
        self.__dict__["stages"], self.__dict__["index"] = stages, index  # not registered as submodules

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the block if it belongs to this stage, else pass its input on."""
        return self.__dict__["stages"].run_block(self.__dict__["index"], args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the block that the model reads (for example its type of attention)."""
        stages, index = self.__dict__["stages"], self.__dict__["index"]
        if index < stages.next_index:
            raise UnsupportedLayoutError(
                f"pipeline: the model reads {name} of block {index} after it has run, and another stage may have run "
                "it; hand it on in the block's output"
            )
        return getattr(stages.blocks[index], name)


def modules_outside(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that the model has without its blocks, also those that a block has too."""
    seen, outside, waiting = set(blocks), list[nn.Module](), [model]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            outside.append(module)
            waiting += module.children()
    return outside


def has_persistent_buffers(module: nn.Module) -> bool:
    """Return whether a module, without its submodules, has buffers in its state dict."""
    return any(name in module.state_dict() for name, _ in module.named_buffers(recurse=False))


def release_tensors(block: nn.Module, used_modules: Collection[nn.Module]) -> None:
    """Free all tensors of a block, except those of modules that are still used."""
    for module in block.modules():
        if module in used_modules:
            continue
        for name, _ in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, None)
        for name, _ in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, None)
