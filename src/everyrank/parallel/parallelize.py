"""Build the model of one rank: apply tensor, expert and context parallelism, checkpointing and compilation in order."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections import UserDict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from everyrank.data import Batch
from everyrank.data.loader import map_tensors
from everyrank.errors import UnsupportedLayoutError, WorkloadError
from everyrank.layout import DATA_AXES, Layout
from everyrank.layout.options import BatchNormOptions, BuildOptions
from everyrank.parallel.batch_norm import apply_batch_norm, broadcast_statistics, statistics_of
from everyrank.parallel.context.apply import ContextParallel, apply_context_parallel
from everyrank.parallel.context.parts import SequenceParts
from everyrank.parallel.dropout.apply import FunctionalDropout, apply_exact_dropout
from everyrank.parallel.dropout.exact import ExactDropout
from everyrank.parallel.expert import apply_expert_parallel
from everyrank.parallel.init_model import init_model, materialise
from everyrank.parallel.mesh import Mesh, full_tensor
from everyrank.parallel.micro_batch import ContextFactory, MicroBatchState
from everyrank.parallel.tensor.apply import TensorParallel, apply_tensor_parallel
from everyrank.workload import Workload
from everyrank.world import World, single_process_world

__all__ = [
    "ParallelModel",
    "broadcast_from_rank_0",
    "call_model",
    "find_blocks",
    "find_called_blocks",
    "parallelize",
    "set_up_exact_dropout",
]


@dataclass
class ParallelModel:
    """The model as laid out on this rank, and the state that its forward passes need.

    rank_0_model        rank 0's model in full, as long as the model itself is on the meta device
    micro_batch_state   the state of the current micro-batch
    tensor_parallel     the tensor parallelism; None if the axis has one rank, or a user's function splits the model
    context_parallel    the context parallelism; None if the axis has one rank
    experts             modules whose experts are split over the expert axis; [] if the axis has one rank
    dropout             the state of exact dropout; None if torch draws the masks, or without dropout
    is_first_call_done  `call_once` was called, or must not call its function
    """

    workload: Workload
    layout: Layout
    mesh: Mesh
    model: nn.Module
    rank_0_model: nn.Module | None
    micro_batch_state: MicroBatchState
    tensor_parallel: TensorParallel | None
    context_parallel: ContextParallel | SequenceParts | None
    experts: Sequence[nn.Module] = ()
    dropout: ExactDropout | None = None
    is_first_call_done: bool = False

    @property
    def is_meta(self) -> bool:
        """Whether the model is built on the meta device because no rank can hold all of it."""
        return self.layout.read(BuildOptions).meta

    def materialise(self) -> None:
        """Fill a model on the meta device with values, after it is sharded or split into stages. Else do nothing."""
        if self.is_meta:
            materialise(self.model, self.rank_0_model, self.mesh.world)
            self.rank_0_model = None

    @contextlib.contextmanager
    def micro_batch(self, batch: Batch) -> Generator[Batch]:
        """Enter the contexts of a micro-batch for its forward and backward. Yields this rank's part of the batch."""
        local_batch = self.context_parallel.take(batch) if self.context_parallel is not None else batch
        if self.dropout is not None:
            positions = self.context_parallel.local_positions if self.context_parallel is not None else ()
            self.dropout.begin(local_batch, positions)
        self.micro_batch_state.is_padding = not batch.size
        with contextlib.ExitStack() as stack:
            for context in self.micro_batch_state.contexts:
                stack.enter_context(context())
            yield local_batch
        if self.context_parallel is not None:
            self.context_parallel.check()

    def count_once(self, pair: Tensor) -> Tensor:
        """Return `pair`, [sum, count], on the first rank of the tensor axis; zeros on the others (same loss)."""
        return pair if self.mesh.is_first("tensor") else torch.zeros_like(pair)

    def call_once(self, function: Callable[[], None]) -> bool:
        """Call `function` and return True. Later calls of this method do nothing and return False."""
        if self.is_first_call_done:
            return False
        self.is_first_call_done = True
        function()
        return True

    def end_update(self) -> None:
        """Finish an update after the optimizer's step: with local batch norm, broadcast rank 0's running statistics."""
        broadcast_statistics(self._statistics_to_broadcast, self.mesh.world)

    @functools.cached_property
    def _statistics_to_broadcast(self) -> list[Tensor]:
        """Running statistics that rank 0 broadcasts after each update: all with batch_norm=local, otherwise []."""
        return statistics_of(self.model) if self.layout.read(BatchNormOptions).batch_norm == "local" else []

    def reduce_partial_grads(self) -> None:
        """After the last backward, all-reduce gradients that are partial sums over the tensor axis."""
        if self.tensor_parallel is not None:
            self.tensor_parallel.reduce_partial_grads()

    def gather_output(self, output: Any) -> Any:
        """Gather an output that is split over several ranks. A collective for split outputs."""
        output = map_tensors(output, full_tensor)
        return self.context_parallel.gather_output(output) if self.context_parallel is not None else output


def parallelize(
    workload: Workload,
    layout: Layout,
    mesh: Mesh,
    broadcast: bool = True,
    contexts: Sequence[ContextFactory] = (),
    local_statistics: bool = False,
) -> ParallelModel:
    """Build the model of this rank, in training mode. Apply all changes of the model in the order they require.

    Then a strategy wraps the model in DDP, shards it (`apply_fsdp`) or splits it into stages (`apply_pipeline`): blocks
    are checkpointed first, then compiled, then wrapped. A strategy that supports meta=true calls `materialise` last.

    broadcast   start every rank from rank 0's weights
    contexts    more contexts, entered around each micro-batch and around recomputed blocks
    local_statistics   compute batch norm over the local samples, also without batch_norm=local
    """
    model, rank_0_model = init_model(workload, layout, mesh.world)
    _check_dense_gradients(model, layout, mesh)
    if broadcast and not layout.read(BuildOptions).meta:
        broadcast_from_rank_0(model, mesh.world)
    tensor_parallel = apply_tensor_parallel(model, workload, layout, mesh)
    dropout, dropout_contexts = set_up_exact_dropout(workload, layout, mesh, model)
    experts = apply_expert_parallel(model, workload, layout, mesh)
    context_parallel = apply_context_parallel(model, workload, layout, mesh, dropout)
    state = MicroBatchState(
        contexts=[
            *dropout_contexts,
            *(parallel.context for parallel in (tensor_parallel, context_parallel) if parallel is not None),
            *contexts,
        ],
        recompute_contexts=[
            *dropout_contexts,
            *([context_parallel.context] if context_parallel is not None else []),
            *contexts,
        ],
    )
    # in one process too: recomputation must not update running statistics twice; a simulated rank may have no sample
    if mesh.world.group is not None or layout.recompute or layout.simulated:
        is_local = local_statistics or layout.read(BatchNormOptions).batch_norm == "local"
        apply_batch_norm(model, state, single_process_world(mesh.world) if is_local else _batch_norm_world(mesh))
    if layout.recompute:
        _apply_recompute(model, workload, layout, state, dropout)
    if layout.compile:
        _apply_compile(model, workload, layout)
    return ParallelModel(
        workload,
        layout,
        mesh,
        model.train(),
        rank_0_model,
        state,
        tensor_parallel,
        context_parallel,
        experts,
        dropout,
    )


def _check_dense_gradients(model: nn.Module, layout: Layout, mesh: Mesh) -> None:
    """Raise `UnsupportedLayoutError` for sparse embedding gradients under a layout that reduces gradients."""
    if mesh.world.group is None or layout.strategy == "local_sgd":
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UnsupportedLayoutError(
                f"layout {layout}: the gradient of {name} is sparse, and only dense gradients are reduced over ranks; "
                f"build {type(module).__name__} with sparse=False, or train with layout single or local_sgd"
            )


def set_up_exact_dropout(
    workload: Workload, layout: Layout, mesh: Mesh, model: nn.Module
) -> tuple[ExactDropout | None, list[ContextFactory]]:
    """Set up exact dropout. Returns (state or None without dropout, contexts to enter around each micro-batch)."""
    dropout = apply_exact_dropout(model, workload, layout, mesh, functools.partial(find_blocks, workload, model))
    if dropout is None or not dropout.is_watching:
        return dropout, []
    return dropout, [functools.partial(FunctionalDropout, dropout)]


def _batch_norm_world(mesh: Mesh) -> World:
    """Return a world of the ranks that have different samples or parts of sequences."""
    # on CUDA, batch norm has its own communicator: in DDP's, its collectives would queue behind gradient buckets
    use = "batch norm" if mesh.world.device.type == "cuda" else ""
    size, group = mesh.size(*DATA_AXES), mesh.group(*DATA_AXES, use=use)
    return dataclasses.replace(mesh.world, rank=mesh.data_rank, size=size, group=group)


def broadcast_from_rank_0(model: nn.Module, world: World) -> None:
    """Broadcast parameters and buffers of rank 0, in case building the model used unseeded random numbers."""
    if world.size > 1:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0, group=world.group)


def find_blocks(workload: Workload, model: nn.Module) -> list[nn.Module]:
    """Return the children of the module at the path `Workload.blocks`, in order; [] if the path is None.

    Raises `WorkloadError` for a wrong path, or a module without children.
    """
    if workload.blocks is None:
        return []
    try:
        parent = model.get_submodule(workload.blocks)
    except AttributeError:
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
        names = [name for name in lists if name]  # the name of the model itself is ""
        hint = f"; it has {', '.join(names)}" if names else ""
        raise WorkloadError(f"blocks={workload.blocks!r}: the model has no such module{hint}") from None
    blocks = list(parent.children())
    if not blocks:
        raise WorkloadError(f"blocks={workload.blocks!r}: that module has no children to take as blocks")
    return blocks


def find_called_blocks(workload: Workload, layout: Layout, model: nn.Module) -> list[nn.Module]:
    """Return the blocks for a layout that changes what calling a block does.

    Raises `UnsupportedLayoutError` for blocks without a forward (a ModuleList of layers), which no code calls.
    """
    blocks = find_blocks(workload, model)
    for block in blocks:
        if type(block).forward is nn.Module.forward:
            raise UnsupportedLayoutError(
                f"layout {layout}: blocks={workload.blocks!r} contains a {type(block).__name__}, which has no forward, "
                "but this layout needs blocks that the model calls; make each block a module with a forward"
            )
    return blocks


def _apply_recompute(
    model: nn.Module, workload: Workload, layout: Layout, state: MicroBatchState, dropout: ExactDropout | None
) -> None:
    """Apply activation checkpointing: keep only the input of each block, run it again in backward (Chen et al. 2016).

    Raises `WorkloadError` for a workload without blocks.
    """
    blocks = find_called_blocks(workload, layout, model)
    if not blocks:
        raise WorkloadError(
            f"layout {layout}: recompute needs the repeated blocks; set Workload.blocks, for example 'layers'"
        )

    def contexts() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        return contextlib.nullcontext(), state.recomputing() if dropout is None else _recompute_with_same_masks(
            state, dropout
        )

    for block in blocks:
        original = block.forward
        block.forward = functools.partial(checkpoint, original, use_reentrant=False, context_fn=contexts)


def _recompute_with_same_masks(state: MicroBatchState, dropout: ExactDropout) -> contextlib.AbstractContextManager[Any]:
    """Save the dropout state now. Return a context in which a block is recomputed with the same masks."""
    moment = dropout.moment()

    @contextlib.contextmanager
    def entered() -> Generator[None]:
        with dropout.back_at(moment), state.recomputing():
            yield

    return entered()


def _apply_compile(model: nn.Module, workload: Workload, layout: Layout) -> None:
    """Apply torch.compile to each block, or to the whole model if `Workload.blocks` is None."""
    for module in find_called_blocks(workload, layout, model) or [model]:
        module.compile()


def call_model(model: nn.Module, value: Any, kind: type[nn.Module] | None = None) -> Any:
    """Call `model` with an input as the dataset made it.

    `kind` is the class whose `forward` signature counts, in case `model` is a wrapper.

    A dict, also a UserDict such as the BatchEncoding of a tokenizer, is passed as keyword arguments if `forward` has
    these names. A tuple or list is passed as positional arguments if `forward` takes that many. Every other value is
    passed as one argument.
    """
    if isinstance(value, dict | UserDict):
        names, takes_any = _keywords((kind or type(model)).forward)
        if takes_any or names.issuperset(value):
            return model(**value)
    elif isinstance(value, tuple | list) and _max_positional_args((kind or type(model)).forward) >= len(value):
        return model(*value)
    return model(value)


@functools.cache
def _keywords(forward: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return frozenset(parameter.name for parameter in parameters), takes_any


@functools.cache
def _max_positional_args(forward: Callable[..., Any]) -> float:
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return float("inf")
    return sum(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters
    )
