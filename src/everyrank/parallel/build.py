"""The model of one rank, before any strategy touches it. One place owns the order of what is done to it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from everyrank.data import Batch
from everyrank.data.loader import map_tensors
from everyrank.errors import WorkloadError
from everyrank.layout import Layout
from everyrank.parallel.batch_norm import ForwardState, synchronise_batch_norm
from everyrank.parallel.construct import construct
from everyrank.parallel.context import SplitContext, split_context
from everyrank.parallel.mesh import Mesh
from everyrank.parallel.tensor import SplitModel, split
from everyrank.workload import Workload
from everyrank.world import World

__all__ = [
    "Built",
    "autocast",
    "broadcast_from_rank_0",
    "build",
    "call",
    "compute_dtype",
    "find_blocks",
]


@dataclass(frozen=True)
class Built:
    """A model, and what its forward passes need to know of the batch in progress.

    `full` is rank 0's model of full size, where the model itself is on the meta device still.
    """

    model: nn.Module
    full: nn.Module | None
    mesh: Mesh
    forward: ForwardState
    tensor: SplitModel | None
    context: SplitContext | None

    @contextlib.contextmanager
    def passing(self, batch: Batch) -> Generator[Batch]:
        """While a batch goes through the model, forward and backward; gives the part of it that goes in here."""
        part = self.context.take(batch) if self.context is not None else batch
        with self.forward.passing(is_borrowed=not batch.size):
            yield part
        if self.context is not None:
            self.context.check()

    def share(self, pair: Tensor) -> Tensor:
        """The rank's share of (sum, count): ranks that split a matrix compute the same loss; one counts."""
        return pair if self.mesh.is_first("tensor") else torch.zeros_like(pair)

    def once(self, look: Callable[[], None]) -> bool:
        """Before the first update alone: look whether the model is what was taken for granted; whether it was that."""
        if self.forward.is_looked_at:
            return False
        self.forward.is_looked_at = True
        look()
        return True

    def finish(self) -> None:
        """After the last backward of an update: complete the gradients of what tensor ranks have parts of."""
        if self.tensor is not None:
            self.tensor.finish()

    def whole(self, output: Any) -> Any:
        """An output that several ranks have parts of, put together; a collective of these."""
        output = map_tensors(output, lambda tensor: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        return self.context.whole(output) if self.context is not None else output


def build(workload: Workload, layout: Layout, mesh: Mesh, is_sent_round: bool = True) -> Built:
    """The model of this rank. This is the one place that owns the order in which mechanisms are applied to it:

    seeded, in its precision, on its device, alike on all ranks (where `is_sent_round`), batch norm over all that read,
    matrices split (tensor), sequences split (context), recomputing, compiled. What a strategy shards, or cuts into
    stages, it does afterwards: recomputation has to be inside what is compiled, and both inside what is sharded.
    """
    world = mesh.world
    model, full = construct(workload, layout, world, compute_dtype(layout))
    if is_sent_round and layout.options.get("meta") is not True:
        broadcast_from_rank_0(model, world)
    state = ForwardState()
    if world.group is not None or layout.recompute:  # recomputing must not move running statistics twice
        synchronise_batch_norm(model, state, _readers(mesh))
    tensor = split(model, workload, layout, mesh)
    context = split_context(model, workload, layout, mesh)
    state.contexts += [part.context for part in (tensor, context) if part is not None]
    state.again += [context.context] if context is not None else []
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
    return Built(model.train(), full, mesh, state, tensor, context)


def _readers(mesh: Mesh) -> World:
    """The ranks that have samples, or parts of sequences, of their own, as a world of their own."""
    axes = ("replicate", "shard", "context")
    return dataclasses.replace(mesh.world, rank=mesh.draws, size=mesh.size(*axes), group=mesh.group(*axes))


def broadcast_from_rank_0(model: nn.Module, world: World) -> None:
    """Start every rank from rank 0's parameters and buffers, also where building drew on something unseeded."""
    if world.size > 1:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0, group=world.group)


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
