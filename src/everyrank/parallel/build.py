"""The model of one rank, before any strategy touches it. One place owns the order of what is done to it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from everyrank.errors import WorkloadError
from everyrank.layout import Layout
from everyrank.parallel.batch_norm import ForwardState, find_batch_norms, synchronise_batch_norm
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["Built", "autocast", "build", "call", "compute_dtype", "find_blocks", "seed_everything"]


@dataclass(frozen=True)
class Built:
    """A model, and what its forward passes need to know of the batch in progress."""

    model: nn.Module
    forward: ForwardState


def build(workload: Workload, layout: Layout, world: World) -> Built:
    """The model: seeded, in its precision, on its device, batch norm over all ranks, recomputing, compiled.

    The order matters: recomputation has to be inside what is compiled, and both inside what is later sharded.
    """
    seed_everything(workload.seed)
    model: object = workload.model()
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"workload {workload.name}: model() returned {type(model).__name__}, not an nn.Module")
    model.to(world.device, compute_dtype(layout))
    state = ForwardState()
    if world.group is not None or layout.recompute:  # recomputing must not move running statistics twice
        synchronise_batch_norm(model, state, world)
    blocks = find_blocks(workload, model)
    if layout.recompute:
        if not blocks:
            raise WorkloadError(
                f"layout {layout}: recompute needs the repeated blocks; set Workload.blocks, for example 'layers'"
            )
        _recompute(blocks, state)
    if layout.compile:
        for module in blocks or [model]:
            module.compile()
    return Built(model.train(), state)


def seed_everything(seed: int) -> None:
    """All generators that model code draws from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def compute_dtype(layout: Layout) -> torch.dtype:
    """The dtype of parameters and inputs; bf16 and fp16 compute in less, but keep float32 parameters."""
    return torch.float64 if layout.precision == "float64" else torch.float32


def autocast(layout: Layout, world: World) -> contextlib.AbstractContextManager[Any]:
    """The context in which the forward pass runs."""
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(layout.precision)
    return torch.autocast(world.device.type, dtype=low) if low else contextlib.nullcontext()


def find_blocks(workload: Workload, model: nn.Module) -> list[nn.Module]:
    """The modules at `Workload.blocks`, in order; [] where it is None. Raises `WorkloadError` for a wrong path."""
    if workload.blocks is None:
        return []
    try:
        parent = model.get_submodule(workload.blocks)
    except AttributeError:
        names = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
        hint = f"; it has {', '.join(names)}" if any(names) else ""
        raise WorkloadError(f"blocks={workload.blocks!r}: the model has no such module{hint}") from None
    blocks = list(parent.children())
    if not blocks:
        raise WorkloadError(f"blocks={workload.blocks!r}: that module has no children to take as blocks")
    return blocks


def has_batch_norm(model: nn.Module) -> bool:
    """Whether some statistics of the model span the samples of a batch."""
    return bool(find_batch_norms(model))


def _recompute(blocks: list[nn.Module], state: ForwardState) -> None:
    """Keep only the input of each block; its forward runs again during backward (Chen et al. 2016)."""

    def contexts() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        return contextlib.nullcontext(), state.recomputing()

    for block in blocks:
        original = block.forward
        block.forward = functools.partial(checkpoint, original, use_reentrant=False, context_fn=contexts)


def call(model: nn.Module, value: Any) -> Any:
    """`model` applied to an input as the data set made it.

    A tensor is the only argument. A dict is passed by keyword when `forward` has those names, a tuple in order when
    `forward` takes that many; else each is the only argument.
    """
    if isinstance(value, dict):
        names, takes_any = _keywords(type(model).forward)
        if takes_any or names.issuperset(value):
            return model(**value)
    elif isinstance(value, tuple | list) and _positions(type(model).forward) >= len(value):
        return model(*value)
    return model(value)


@functools.cache
def _keywords(forward: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return frozenset(parameter.name for parameter in parameters), takes_any


@functools.cache
def _positions(forward: Callable[..., Any]) -> float:
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return float("inf")
    return sum(parameter.kind is not parameter.KEYWORD_ONLY for parameter in parameters)
