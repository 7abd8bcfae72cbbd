"""Build the model of one rank: the single place that fixes the order of all mechanisms."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
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

__all__ = ["ParallelModel", "broadcast_from_rank_0", "call_model", "exact_dropout", "find_blocks", "parallelize"]


@dataclass
class ParallelModel:
    """The model as laid out on this rank, and the state that its forward passes need.

    rank_0_model        rank 0's model in full, as long as the model itself is on the meta device
    micro_batch_state   the state of the current micro-batch
    tensor              the tensor parallelism; None if the axis has one rank
    context             the context parallelism; None if the axis has one rank
    experts             modules whose experts are split over the expert axis; [] if the axis has one rank
    dropout             the state of exact dropout; None if torch draws the masks, or without dropout
    is_checked          the check before the first update is done or disabled
    """

    workload: Workload
    layout: Layout
    mesh: Mesh
    model: nn.Module
    rank_0_model: nn.Module | None
    micro_batch_state: MicroBatchState
    tensor: TensorParallel | None
    context: ContextParallel | SequenceParts | None
    experts: Sequence[nn.Module] = ()
    dropout: ExactDropout | None = None
    is_checked: bool = False

    @property
    def is_meta(self) -> bool:
        """Whether the model is built on the meta device because no rank can hold all of it."""
        return self.layout.read(BuildOptions).meta

    def materialise(self) -> None:
        """Fill a model from the meta device with values, after everything that splits it."""
        if self.is_meta:
            materialise(self.model, self.rank_0_model, self.mesh.world)
            self.rank_0_model = None

    @contextlib.contextmanager
    def micro_batch(self, batch: Batch) -> Generator[Batch]:
        """Enter a batch for forward and backward. Yields the part of it that this rank computes on."""
        local_batch = self.context.take(batch) if self.context is not None else batch
        if self.dropout is not None:
            self.dropout.begin(local_batch, self.context.pieces if self.context is not None else ())
        with self.micro_batch_state.enter(is_padding=not batch.size):
            yield local_batch
        if self.context is not None:
            self.context.check()

    def count_once(self, pair: Tensor) -> Tensor:
        """Return (sum, count), shape (2,), on the first tensor rank and zeros on the others, whose loss is the same."""
        return pair if self.mesh.is_first("tensor") else torch.zeros_like(pair)

    def before_first_update(self, check: Callable[[], None]) -> bool:
        """Call `check` once, before the first update. Returns True in that call, False later."""
        if self.is_checked:
            return False
        self.is_checked = True
        check()
        return True

    def end_update(self) -> None:
        """Finish an update after the optimizer's step: with local batch norm, broadcast rank 0's running statistics."""
        broadcast_statistics(self._local_statistics, self.mesh.world)

    @functools.cached_property
    def _local_statistics(self) -> list[Tensor]:
        """Running statistics that each rank computes from its own samples; [] if they are those of all ranks."""
        return statistics_of(self.model) if self.layout.read(BatchNormOptions).batch_norm == "local" else []

    def reduce_partial_grads(self) -> None:
        """After the last backward, all-reduce gradients that are partial sums over the tensor axis."""
        if self.tensor is not None:
            self.tensor.reduce_partial_grads()

    def gather_output(self, output: Any) -> Any:
        """Gather an output that is split over several ranks. A collective for split outputs."""
        output = map_tensors(output, full_tensor)
        return self.context.gather_output(output) if self.context is not None else output


def parallelize(
    workload: Workload,
    layout: Layout,
    mesh: Mesh,
    broadcast: bool = True,
    contexts: Sequence[ContextFactory] = (),
    local_statistics: bool = False,
) -> ParallelModel:
    """Build the model of this rank, in training mode. Only this function fixes the order of mechanisms.

    A strategy shards (`apply_ddp`, `apply_fsdp`) or splits into stages (`apply_pipeline`) afterwards: recomputation has
    to be inside compilation, and both inside sharding. Then it calls `materialise`.

    broadcast   start every rank from rank 0's weights
    contexts    more contexts, entered around each micro-batch and around recomputed blocks
    local_statistics   compute batch norm over the local samples, also without batch_norm=local
    """
    model, rank_0_model = init_model(workload, layout, mesh.world)
    _check_dense_gradients(model, layout, mesh)
    if broadcast and not layout.read(BuildOptions).meta:
        broadcast_from_rank_0(model, mesh.world)
    tensor = apply_tensor_parallel(model, workload, layout, mesh)
    dropout, functions = exact_dropout(workload, layout, mesh, model)
    experts = apply_expert_parallel(model, workload, layout, mesh)
    context = apply_context_parallel(model, workload, layout, mesh, dropout)
    state = MicroBatchState(
        contexts=[
            *functions,
            *(mechanism.context for mechanism in (tensor, context) if mechanism is not None),
            *contexts,
        ],
        recompute_contexts=[*functions, *([context.context] if context is not None else []), *contexts],
    )
    # recomputation must not update running statistics twice, and a simulated rank may have no sample
    if mesh.world.group is not None or layout.recompute or layout.simulated:
        is_local = local_statistics or layout.read(BatchNormOptions).batch_norm == "local"
        apply_batch_norm(model, state, single_process_world(mesh.world) if is_local else _batch_norm_world(mesh))
    if layout.recompute:
        _apply_recompute(model, workload, layout, state, dropout)
    if layout.compile:
        _apply_compile(model, workload)
    return ParallelModel(workload, layout, mesh, model.train(), rank_0_model, state, tensor, context, experts, dropout)


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


def exact_dropout(
    workload: Workload, layout: Layout, mesh: Mesh, model: nn.Module
) -> tuple[ExactDropout | None, list[ContextFactory]]:
    """Set up exact dropout. Returns (its state, contexts to enter around it), or (None, []) without dropout."""
    dropout = apply_exact_dropout(model, workload, layout, mesh, functools.partial(find_blocks, workload, model))
    if dropout is None or not dropout.is_watching:
        return dropout, []
    return dropout, [functools.partial(FunctionalDropout, dropout)]


def _batch_norm_world(mesh: Mesh) -> World:
    """Return a world of the ranks that have different samples or parts of sequences."""
    # on CUDA a separate communicator: in that of DDP, its small collectives would wait for the gradient buckets
    use = "batch norm" if mesh.world.device.type == "cuda" else ""
    size, group = mesh.size(*DATA_AXES), mesh.group(*DATA_AXES, use=use)
    return dataclasses.replace(mesh.world, rank=mesh.data_rank, size=size, group=group)


def broadcast_from_rank_0(model: nn.Module, world: World) -> None:
    """Broadcast parameters and buffers of rank 0, in case building the model used unseeded random numbers."""
    if world.size > 1:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0, group=world.group)


def find_blocks(workload: Workload, model: nn.Module) -> list[nn.Module]:
    """Return the modules at `Workload.blocks`, in order; [] for None. Raises `WorkloadError` for a wrong path."""
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


def _apply_recompute(
    model: nn.Module, workload: Workload, layout: Layout, state: MicroBatchState, dropout: ExactDropout | None
) -> None:
    """Apply activation checkpointing: keep only the input of each block, run it again in backward (Chen et al. 2016).

    Raises `WorkloadError` for a workload without blocks.
    """
    blocks = find_blocks(workload, model)
    if not blocks:
        raise WorkloadError(
            f"layout {layout}: recompute needs the repeated blocks; set Workload.blocks, for example 'layers'"
        )

    def contexts() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        return contextlib.nullcontext(), state.recomputing() if dropout is None else _as_before(state, dropout)

    for block in blocks:
        original = block.forward
        block.forward = functools.partial(checkpoint, original, use_reentrant=False, context_fn=contexts)


def _as_before(state: MicroBatchState, dropout: ExactDropout) -> contextlib.AbstractContextManager[Any]:
    """Return contexts for recomputing a block with the same dropout masks."""
    moment = dropout.moment()

    @contextlib.contextmanager
    def entered() -> Generator[None]:
        with dropout.back_at(moment), state.recomputing():
            yield

    return entered()


def _apply_compile(model: nn.Module, workload: Workload) -> None:
    """Apply torch.compile to each block, or to the whole model without blocks."""
    for module in find_blocks(workload, model) or [model]:
        module.compile()


def call_model(model: nn.Module, value: Any, kind: type[nn.Module] | None = None) -> Any:
    """Call `model` with an input as the dataset made it.

    `kind` is the class whose `forward` signature counts, in case `model` is a wrapper.

    A tensor is the only argument. A dict is passed by keyword if `forward` has those names, a tuple by position if
    `forward` takes that many; otherwise they are the only argument.
    """
    if isinstance(value, dict):
        names, takes_any = _keywords((kind or type(model)).forward)
        if takes_any or names.issuperset(value):
            return model(**value)
    elif isinstance(value, tuple | list) and _positions((kind or type(model)).forward) >= len(value):
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
