"""Run the real `prepare` and `step` of any layout on fake tensors, for any rank and world size.

`World.pretend` has no other ranks and fake tensors have no values, so some functions of torch and everyrank cannot run
unchanged. Inside `_pretended` they are replaced:

- `nn.Module._apply` swaps fake parameters, and refuses where anything refers to them weakly
- DeviceMesh computes with real tensors
- DistributedDataParallel's reducer reads values in C++: `StandInDDP` keeps the same buckets
- a pipeline stage receives shapes from the previous stage: they are taken from the blocks of the whole model
- with meta=true, rank 0's whole model is in files: it is not counted, and other ranks get its shapes
- DTensor learns the shape of a result from fake tensors of the whole shape: they are not counted
- comparisons between ranks, and with the whole model, before the first update are skipped
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from everyrank.data import Batch
from everyrank.data.loader import map_tensors
from everyrank.data.slicing import cut, micro_batches
from everyrank.layout import Layout
from everyrank.parallel import ddp, init_model, mesh
from everyrank.parallel.init_model import on_meta
from everyrank.parallel.parallelize import call_model, find_blocks
from everyrank.parallel.pipeline.run import PipelineRun
from everyrank.plan.as_on_gpu import fused_norms, take_all_at_once
from everyrank.plan.trace import Operator, StorageTrace
from everyrank.strategies import Prepared, prepare
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["StandInDDP", "TracedStep", "first_sample", "micro_batches_of", "trace_step"]


@dataclass(frozen=True)
class TracedStep:
    """The memory and operators of one rank in an update after the first.

    peak_bytes   peak of live bytes, and `categories` at that moment
    build_bytes  peak of live bytes while the model was built and in the first update
    state_bytes  live bytes between two updates
    operators    the operators of the update, in order; groups: the ranks of each process group that they use
    events       (change in bytes, key, stream) of each storage since the model was built, for a replay of the allocator
    start        index of the first event of the update
    """

    rank: int
    size: int
    peak_bytes: int
    categories: Mapping[str, int]
    build_bytes: int
    state_bytes: int
    operators: tuple[Operator, ...]
    groups: Mapping[str, tuple[int, ...]]
    events: tuple[tuple[int, int, int], ...]
    start: int

    @property
    def flops(self) -> int:
        """Operations of products and attention."""
        return sum(operator.flops for operator in self.operators)

    def collectives(self) -> dict[str, int]:
        """Return name -> number of calls."""
        names = [operator.name for operator in self.operators if operator.group]
        return {name: names.count(name) for name in dict.fromkeys(names)}


class StandInDDP(nn.Module):
    """DistributedDataParallel's memory and traffic without its reducer: buckets of gradients, one all-reduce for each.

    Buckets hold the gradients, as gradient_as_bucket_view=True has it: 1 MiB first, then `bucket_cap_mb` (25) each, in
    the reverse order of the parameters.
    """

    def __init__(
        self, module: nn.Module, process_group: Any = None, bucket_cap_mb: float | None = None, **_: Any
    ) -> None:
        super().__init__()
        self.module, self.is_syncing = module, True
        self.group: Any = process_group
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        named = [p for name, p in module.named_parameters() if p.requires_grad and name not in ignored]
        limit = (bucket_cap_mb or 25) * 2**20
        self.buckets: list[tuple[Tensor, list[nn.Parameter]]] = []
        members: list[nn.Parameter] = []
        size, bucket_limit = 0.0, float(2**20)
        for index, parameter in enumerate(reversed(named)):
            members.append(parameter)
            size += parameter.nbytes
            if size >= bucket_limit or index == len(named) - 1:
                total = sum(parameter.numel() for parameter in members)
                self.buckets.append((torch.zeros(total, dtype=members[0].dtype, device=members[0].device), members))
                members, size, bucket_limit = [], 0.0, limit
        for flat, parameters in self.buckets:
            for parameter, view in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.register_post_accumulate_grad_hook(self._into(view.view_as(parameter)))

    def _into(self, view: Tensor) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if self.is_syncing and parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = view

        return hook

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None]:
        """Keep the gradients of this micro-batch outside the buckets."""
        self.is_syncing = False
        try:
            yield
        finally:
            self.is_syncing = True

    def forward(self, value: Any) -> Any:
        """Return the module's output, and count one all-reduce for each bucket, as backward would send it."""
        output = self.module(value)
        if self.is_syncing and torch.is_grad_enabled():
            for flat, _ in self.buckets:
                dist.all_reduce(flat, group=self.group)
        return output

    def register_comm_hook(self, *_: Any) -> None:
        """Do nothing, because compression does not change the memory."""

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: Any, names: Any) -> None:
        module._ddp_params_and_buffers_to_ignore = list(names)


_CONVERTED: WeakKeyDictionary[Callable[[Tensor], Tensor], dict[int, nn.Parameter]] = WeakKeyDictionary()
"""The new parameters of each conversion, by the id of the old ones, so that tied parameters stay tied."""


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Convert parameters and buffers without swapping tensors, because fake tensors cannot be swapped."""
    if recurse:
        for module in self.children():
            module._apply(fn)  # pyright: ignore[reportPrivateUsage]
    converted = _CONVERTED.setdefault(fn, {})
    tensors: Any = self  # pyright rejects the private fields `_parameters` and `_buffers`
    for name, parameter in tensors._parameters.items():
        if parameter is None:
            continue
        if id(parameter) not in converted:
            with torch.no_grad():
                values = fn(parameter)
            has_changed = (values.dtype, values.device) != (parameter.dtype, parameter.device)
            new_parameter = nn.Parameter(values, parameter.requires_grad) if has_changed else parameter
            # also its own id, which a freed parameter may have had: a module that two others share is visited twice
            converted[id(parameter)] = converted[id(new_parameter)] = new_parameter
        tensors._parameters[name] = converted[id(parameter)]
    for name, buffer in tensors._buffers.items():
        if buffer is not None:
            tensors._buffers[name] = fn(buffer)
    return self


def _outside_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def _pretended(
    trace: StorageTrace, workload: Workload, shape: Callable[[], tuple[torch.dtype, tuple[int, ...]]]
) -> Generator[None]:
    """Replace functions that cannot run on fake tensors; `shape` returns dtype and shape of the outputs of stages."""

    @contextlib.contextmanager
    def uncounted() -> Generator[None]:
        was_paused, trace.is_paused = trace.is_paused, True
        try:
            yield
        finally:
            trace.is_paused = was_paused

    def hand_out(full: nn.Module | None, _: World) -> Iterator[tuple[str, Tensor]]:
        model = full if full is not None else on_meta(workload)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            yield name, tensor.detach() if full is not None else torch.empty(tensor.shape, dtype=tensor.dtype)

    shapes_of = ShardingPropagator._propagate_tensor_meta_non_cached  # pyright: ignore[reportPrivateUsage]

    def uncounted_shapes_of(self: Any, op_schema: Any) -> Any:
        with uncounted():
            return shapes_of(self, op_schema)

    receive = PipelineRun._receive  # pyright: ignore[reportPrivateUsage]

    def known_shapes(self: PipelineRun, kind: str, stage: int, index: int, key: Any) -> Tensor:
        self.shapes.setdefault((stage - 1, key) if kind == "F" else (stage, key), shape())
        return receive(self, kind, stage, index, key)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _apply))
        stack.enter_context(mock.patch.object(ddp, "DistributedDataParallel", StandInDDP))
        stack.enter_context(mock.patch.object(PipelineRun, "_receive", known_shapes))
        stack.enter_context(
            mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", uncounted_shapes_of)
        )
        stack.enter_context(mock.patch.object(mesh, "init_device_mesh", _outside_modes(mesh.init_device_mesh)))
        stack.enter_context(mock.patch.object(init_model, "built_in_files", uncounted))
        stack.enter_context(mock.patch.object(init_model, "put_into_file", return_value=None))
        stack.enter_context(mock.patch.object(init_model, "_hand_out", hand_out))
        for name in ("__init__", "_flatten", "__getitem__", "get_local_rank", "_get_slice_mesh_layout"):
            original = getattr(DeviceMesh, name, None)
            if original is not None:
                stack.enter_context(mock.patch.object(DeviceMesh, name, _outside_modes(original)))
        yield


def _block_shape(workload: Workload, batch: Batch) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape of the output of a block, from the whole model on the meta device."""
    model = workload.model()
    blocks = find_blocks(workload, model)
    seen: list[tuple[torch.dtype, tuple[int, ...]]] = []
    blocks[0].register_forward_hook(lambda _, __, output: seen.append((output.dtype, tuple(output.shape))))
    with torch.no_grad():
        call_model(model, batch.input)
    return seen[0]


def trace_step(
    workload: Workload, layout: Layout, size: int, rank: int = 0, samples: Any = None, on_gpu: bool = False
) -> TracedStep:
    """Return the memory and operators of `rank` of `size` in an update of `workload` under `layout`.

    `samples` is (input, target) of one collated sample; by default the first of the training data, which is read. This
    process must not be a rank. `on_gpu`: with the kernels of a GPU (`as_on_gpu.py`). Raises what `prepare`
    raises, and what fake tensors raise for a model whose shapes depend on values.

    Example: `trace_step(find_workload("text"), parse_layout("fsdp"), size=64).peak_bytes / 2**20`.
    """
    sample = samples if samples is not None else first_sample(workload)
    with World.pretend(size, rank) as world, FakeTensorMode(allow_non_fake_inputs=True):
        trace = StorageTrace()
        shapes: list[tuple[torch.dtype, tuple[int, ...]]] = []

        def shape() -> tuple[torch.dtype, tuple[int, ...]]:
            if not shapes:
                shapes.append(_block_shape(workload, micro_batches_of(prepared, sample)[0]))
            return shapes[0]

        with _pretended(trace, workload, shape), fused_norms() if on_gpu else contextlib.nullcontext():
            trace.phase = "parameters"
            with trace:
                prepared = prepare(workload, layout, world)
                if on_gpu:
                    take_all_at_once(prepared.trainable.optimizer)
                prepared.parallel.is_checked = True  # comparisons with the whole model, and between ranks
                if prepared.parallel.tensor is not None:
                    prepared.parallel.tensor.unseen.clear()
                    if prepared.parallel.tensor.view_check is not None:
                        prepared.parallel.tensor.view_check.end()  # the check would keep outputs alive
                        prepared.parallel.tensor.view_check = None
            trace.claim(prepared.trainable.parameters, "parameters")
            trace.claim(prepared.model.buffers(), "buffers")
            _run_update(trace, prepared, sample)
            build_bytes = trace.peak
            gc.collect()  # collects tensors in reference cycles
            state_bytes = trace.live
            trace.reset()
            start = len(trace.events)
            _run_update(trace, prepared, sample)
            return TracedStep(
                rank,
                size,
                trace.peak,
                {name: count for name, count in trace.at_peak.items() if count},
                build_bytes,
                state_bytes,
                tuple(trace.operators),
                _groups(trace.operators),
                tuple(trace.events),
                start,
            )


def _groups(operators: Sequence[Operator]) -> dict[str, tuple[int, ...]]:
    """Return name -> ranks of the process groups of collectives. Names unknown to torch are left out."""
    groups: dict[str, tuple[int, ...]] = {}
    resolve: Any = dist.distributed_c10d._resolve_process_group  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    for name in {operator.group for operator in operators if operator.group}:
        with contextlib.suppress(RuntimeError, KeyError):
            groups[name] = tuple(dist.get_process_group_ranks(resolve(name)))
    return groups


def first_sample(workload: Workload) -> Any:
    """Return (input, target) of one collated sample of the training data."""
    from torch.utils.data import IterableDataset, default_collate

    data = workload.train_data()
    sample = next(iter(data)) if isinstance(data, IterableDataset) else data[0]
    return (workload.collate or default_collate)([sample])


def micro_batches_of(prepared: Prepared, sample: Any, make: Callable[..., Tensor] = torch.empty) -> list[Batch]:
    """Return the micro-batches of an update on this rank, with the shapes of one collated sample.

    `sample` is (input, target) of one sample; `make` is `torch.empty` or `torch.zeros`.
    """
    result: list[Batch] = []
    total = prepared.workload.global_batch
    for positions in micro_batches(total, prepared.num_micro_batches):
        local_positions = cut(len(positions), prepared.data_slice) if prepared.data_slice.count else range(0)
        count = max(len(local_positions), 1)

        def repeat(tensor: Tensor, count: int = count) -> Tensor:
            dtype = prepared.dtype if tensor.is_floating_point() else tensor.dtype
            return make((count, *tensor.shape[1:]), dtype=dtype)

        inputs, target = (map_tensors(value, repeat) for value in sample)
        start = positions.start + local_positions.start
        result.append(Batch(inputs, target, len(local_positions), start, total, prepared.num_micro_batches))
    return result


def _run_update(trace: StorageTrace, prepared: Prepared, sample: Any) -> None:
    def enter(phase: str) -> None:
        trace.phase = {"forward": "activations", "backward": "temporary", "optimizer": "temporary"}.get(phase, "other")

    if not prepared.trainable.phase_observers:
        prepared.trainable.phase_observers.append(enter)
    trace.phase = "input"
    with trace:
        prepared.step(micro_batches_of(prepared, sample))
    parameters = prepared.trainable.parameters
    trace.claim([p.grad for p in parameters if p.grad is not None], "gradients")
    states = prepared.trainable.optimizer.state.values()
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    trace.claim(tensors, "optimizer")
