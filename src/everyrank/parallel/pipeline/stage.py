"""Splits a model at its blocks into the stages of a pipeline, and runs one of them.

A rank keeps the blocks of its own stages and a replica of everything outside the blocks (embeddings, the head). Every
stage runs the forward of the whole model: blocks of other stages pass their input on, the first local block gets the
tensor from the previous stage, and forward ends after the last local block. So other arguments of blocks (positions,
masks, tables) exist on every stage and are not sent. The gradients of a weight that several stages use (a tied
embedding) are summed over these stages. The cost is the memory for these replicas.

This is exact if the unchanged output of every block is the first argument of the next. A model that computes between
its blocks is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from everyrank.data.loader import map_tensors
from everyrank.errors import UnsupportedLayoutError, WorkloadError
from everyrank.layout import Layout
from everyrank.layout.options import PipelineOptions
from everyrank.parallel.batch_norm import has_batch_norm
from everyrank.parallel.dropout.exact import is_in_checkpoint
from everyrank.parallel.mesh import Mesh
from everyrank.parallel.parallelize import find_called_blocks
from everyrank.parallel.pipeline.balance import balance, cost, own_cost
from everyrank.parallel.pipeline.blocks import (
    BlockProxy,
    RemoteBlock,
    has_persistent_buffers,
    modules_outside,
    release_tensors,
)
from everyrank.workload import Workload

__all__ = ["Stages", "apply_pipeline"]


class _StageDone(Exception):  # noqa: N818  (no error)
    """Ends the forward of a stage."""

    def __init__(self, output: Tensor) -> None:
        super().__init__("end of a pipeline stage; everyrank should have caught this")
        self.output = output


class Stages:
    """A model with only the blocks of some stages.

    path            the path of the blocks: `Workload.blocks`
    spans           the blocks of each stage
    stage_numbers   the indices of this rank's stages, out of `count`. Stage s is on pipeline rank s % size
    """

    def __init__(self, model: nn.Module, path: str, spans: Sequence[range], size: int, coordinate: int) -> None:
        container = model.get_submodule(path)
        self.model, self.path, self.container = model, path, container
        self.spans, self.count = spans, len(spans)
        self.stage_numbers = range(coordinate, self.count, size)
        self.blocks: list[nn.Module] = list(container.children())
        names = [name for name, _ in container.named_children()]
        self.proxies = {name: BlockProxy(self, index) for index, name in enumerate(names)}
        self.span = spans[0]
        self.received: Tensor | None = None
        self.handed_on: Tensor | None = None
        self.version = self.next_index = 0
        self.fake_output: Callable[[Tensor], Tensor] | None = None  # in `check_block_order`, for all but the last block
        self.nan_error = ""
        stage_of = {index: number for number, span in enumerate(spans) for index in span}
        for index, (name, block) in enumerate(zip(names, self.blocks, strict=True)):
            if stage_of[index] not in self.stage_numbers:
                container.register_module(name, RemoteBlock(block, stage_of[index] % size))
        # the blocks of other stages stay without tensors, because the model may read their attributes and type
        used_modules = set(self.outside_modules()).union(*(block.modules() for block in self.own_blocks()))
        for block in self.blocks:
            release_tensors(block, used_modules)
        self.direct_children = dict(container.named_children())

    def run(self, number: int, received: Tensor | None, forward: Callable[[], Any]) -> tuple[Any, bool]:
        """Run `forward` of the whole model up to the end of a stage; return (output, whether it is the model's output).

        `received` is the tensor from the previous stage; None for the first.
        """
        self.span, self.received, self.handed_on, self.next_index = self.spans[number], received, None, 0
        self._install(self.proxies)
        try:
            output = forward()
        except _StageDone as done:
            return done.output, False
        finally:
            self._install(self.direct_children)
            self.received = self.handed_on = None
        if number < self.count - 1:
            raise WorkloadError("pipeline: the forward pass does not go through the blocks; check Workload.blocks")
        return output, True

    @torch.no_grad()
    def check_block_order(self, forward: Callable[[], Any]) -> None:
        """Run the whole model with fake blocks: the last returns numbers, the others NaN.

        Raises `UnsupportedLayoutError` on all ranks if the model computes between its blocks, or uses the output of a
        block for anything but the next block. Ignores other errors, because a fake output has the shape of the block's
        input, which may be wrong.
        """
        error = self._run_fake_blocks(forward, lambda value: torch.full_like(value, torch.nan))
        # a model may also have NaN of its own, for example for missing values: it then has NaN with numbers, too
        if error and not self._run_fake_blocks(forward, _numbers_like):
            raise UnsupportedLayoutError(error)

    def _run_fake_blocks(self, forward: Callable[[], Any], fake_output: Callable[[Tensor], Tensor]) -> str:
        """Run the model; all blocks but the last return a `fake_output`. Return what has got NaN as an error, or ""."""
        self.fake_output, self.nan_error = fake_output, ""
        try:
            output, _ = self.run(self.count - 1, None, forward)
        except UnsupportedLayoutError:
            raise
        except Exception:
            return self.nan_error
        finally:
            self.fake_output = None
        if _has_nan(output):
            self.nan_error = self.nan_error or (
                "pipeline: the model uses the output of a block outside the next block, but other stages do not have "
                "this output. Use only the output of the last block after the blocks"
            )
        return self.nan_error

    def _install(self, modules: Mapping[str, nn.Module]) -> None:
        """Replace the blocks by these modules."""
        for name, module in modules.items():
            self.container.register_module(name, module)

    def run_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Run a block if it belongs to this stage, else pass its input on.

        Raises `UnsupportedLayoutError` for a model that computes between its blocks, `WorkloadError` for blocks that
        do not take and return one tensor.
        """
        first, value = self._input_of(index, args, kwargs)
        if self.fake_output is not None:
            return self._hand_on(self._pretend(index, value, args, kwargs, self.fake_output))
        if index not in self.span:
            return self._hand_on(value)
        if index == self.span.start and self.received is not None:
            value = self.received.clone()  # a block may change its argument in place, which a leaf does not allow
        block = self.blocks[index]
        output = block(value, *args[1:], **kwargs) if args else block(**{**kwargs, first: value})
        if not isinstance(output, Tensor):
            raise WorkloadError(
                f"pipeline: block {index} ({type(block).__name__}) returns {type(output).__name__}: a stage sends one "
                "tensor to the next stage. Let the block return only this tensor"
            )
        if index == self.span[-1] and self.span.stop < len(self.blocks):
            raise _StageDone(output)
        return self._hand_on(output)

    def _input_of(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Tensor]:
        """Return the first argument of a block, with its name if it is a keyword argument."""
        if not args and not kwargs:
            raise WorkloadError(f"pipeline: block {index} is called without an argument")
        first = next(iter(kwargs), "")
        value = args[0] if args else kwargs[first]
        if index != self.next_index:
            raise UnsupportedLayoutError(
                f"pipeline: block {index} runs where block {self.next_index} should: the forward pass has to go "
                "through the blocks once, in order"
            )
        self.next_index += 1
        if index and (value is not self.handed_on or value._version != self.version):
            raise UnsupportedLayoutError(
                f"pipeline: the model computes between block {index - 1} and block {index}. The first argument of a "
                "block must be the unchanged output of the previous block. Move the computation into a block"
            )
        if not isinstance(value, Tensor):
            raise WorkloadError(f"pipeline: block {index} gets {type(value).__name__} first, not a tensor")
        return first, value

    def _pretend(
        self,
        index: int,
        value: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fake_output: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return the fake output of a block for `check_block_order`."""
        if is_in_checkpoint():
            raise UnsupportedLayoutError(
                f"pipeline: the model calls block {index} inside torch.utils.checkpoint, which would run it again in "
                "backward, out of order. Remove torch.utils.checkpoint, and use pipeline:recompute=true instead"
            )
        if _has_nan((args[1:], {name: item for name, item in kwargs.items() if item is not value})):
            self.nan_error = self.nan_error or (
                f"pipeline: block {index} also takes the output of an earlier block, but a stage sends only one tensor "
                "to the next stage"
            )
        return _numbers_like(value) if index == len(self.blocks) - 1 else fake_output(value)

    def _hand_on(self, value: Tensor) -> Tensor:
        self.handed_on, self.version = value, value._version
        return value

    def own_blocks(self) -> list[nn.Module]:
        """Return the blocks of this rank."""
        return [self.blocks[index] for number in self.stage_numbers for index in self.spans[number]]

    def own_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that no other stage has."""
        return list(dict.fromkeys(parameter for block in self.own_blocks() for parameter in block.parameters()))

    def outside_buffers(self) -> list[Tensor]:
        """Return the buffers that every stage has."""
        buffers = [buffer for module in self.outside_modules() for buffer in module.buffers(recurse=False)]
        return list({id(buffer): buffer for buffer in buffers}.values())

    def outside_modules(self) -> list[nn.Module]:
        """Return the modules that the model has outside its blocks, and so on every stage."""
        return modules_outside(self.model, self.blocks)


def _has_nan(value: Any) -> bool:
    has_nan: list[bool] = []
    map_tensors(value, lambda tensor: has_nan.append(bool(tensor.isnan().any())) or tensor)
    return any(has_nan)


def _numbers_like(value: Tensor) -> Tensor:
    """Return different numbers between 0.5 and 1.5, which a model can also normalize or take the logarithm of."""
    count = torch.arange(value.numel(), dtype=torch.float32, device=value.device)
    return (1.0 + count.sin() / 2).to(value.dtype).view(value.shape)


def apply_pipeline(model: nn.Module, workload: Workload, layout: Layout, mesh: Mesh) -> Stages:
    """Reduce the model, in place, to the blocks that this rank needs.

    Raises `UnsupportedLayoutError` for a model that cannot be split exactly.
    """
    ranks, options = mesh.size("pipeline"), layout.read(PipelineOptions)
    chunks = options.chunks if options.schedule == "interleaved" else 1
    chunks = chunks if ranks > 1 else 1
    if workload.blocks is None:
        raise UnsupportedLayoutError(
            f"workload {workload.name}: the pipeline layout splits the repeated layers of the model, and `blocks` does "
            'not name them. Set it to their path in the model, for example blocks="layers"'
        )
    blocks = find_called_blocks(workload, layout, model)
    if len(blocks) < ranks * chunks:
        raise UnsupportedLayoutError(
            f"layout {layout}: {ranks * chunks} stages, but there are {len(blocks)} blocks; "
            f"use at most {len(blocks)} stages"
        )
    if has_batch_norm(model):
        raise UnsupportedLayoutError(
            "pipeline: batch norm over micro-batches is not equivalent to batch norm over the whole batch. Use a norm "
            "without statistics over samples, for example LayerNorm, or use ddp"
        )
    _check_ties(model, workload.blocks, blocks)
    costs = [cost(block) for block in blocks]
    # The last stage also computes everything after the blocks (a head). Before the blocks there is usually only an
    # embedding, which needs no multiplications.
    costs[-1] += sum(own_cost(module) for module in modules_outside(model, blocks))
    spans = balance(costs, ranks * chunks)
    return Stages(model, workload.blocks, spans, ranks, mesh.coordinate["pipeline"])


def _check_ties(model: nn.Module, path: str, blocks: Sequence[nn.Module]) -> None:
    """Refuse a weight that a block shares with another block or with a module outside the blocks.

    A shared module may have buffers: they stay on all stages that use it. If they are persistent, they are refused,
    because a checkpoint has them under one name.
    """
    everything = model.named_modules(remove_duplicate=False)
    places = [name for name, module in everything if name.rpartition(".")[0] == path and module in blocks]
    if len(places) > len(blocks):
        raise UnsupportedLayoutError(
            f"pipeline: some of the {len(places)} blocks at {path} are the same module. Give each block its own "
            "module, or use fsdp"
        )
    names = {id(module): name for name, module in model.named_modules()}
    parts = [(names[id(block)], list(block.modules())) for block in blocks]
    weight_owner: dict[int, str] = {}
    buffer_owner: dict[nn.Module, str] = {}
    for name, modules in [*parts, (f"a module outside {path}", modules_outside(model, blocks))]:
        for parameter in (parameter for module in modules for parameter in module.parameters(recurse=False)):
            other = weight_owner.setdefault(id(parameter), name)
            if other != name:
                raise UnsupportedLayoutError(
                    f"pipeline: {other} and {name} share a weight, which would be on two stages. Untie the weights, or "
                    "use fsdp or tensor"
                )
        for module in modules:
            other = buffer_owner.setdefault(module, name)
            if other != name and has_persistent_buffers(module):
                raise UnsupportedLayoutError(
                    f"pipeline: {other} and {name} share the module {names[id(module)]} with persistent buffers, which "
                    "would be on two stages. Register them with persistent=False, or give each its own module"
                )
