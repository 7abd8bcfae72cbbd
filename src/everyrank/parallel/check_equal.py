"""Before the first update, compare output and loss of the split model with the whole model on one sample.

Splitting matrices or sequences can change what a model computes without an error. Examples are a number of heads fixed
in a view, positions counted on a part of a sequence, or a mean over positions. Instead of searching for each pattern,
one sample runs through both models.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from everyrank.data import Batch
from everyrank.data.loader import map_tensors
from everyrank.errors import UnsupportedLayoutError
from everyrank.parallel.fsdp import reshard
from everyrank.parallel.full_state import state_tensors, without_advice
from everyrank.parallel.init_model import init_model, on_meta
from everyrank.parallel.mesh import full_tensor
from everyrank.parallel.parallelize import ParallelModel, call_model
from everyrank.workload import Workload

__all__ = ["check_equal"]

# relative to the largest output: rounding differences are far below it, real differences far above
_TOLERANCE = {"float64": 1e-6, "float32": 1e-4, "bf16": 5e-2, "fp16": 2e-2}
_PIECE = 1 << 20  # elements in each comparison


@torch.no_grad()
def check_equal(parallel: ParallelModel, batch: Batch) -> None:
    """Compare the split model with the whole model on one sample. A collective, before the first update.

    With split matrices each rank builds the full model temporarily. With meta=true the full model does not fit, so
    parameters are gathered one at a time. Raises `UnsupportedLayoutError` on every rank.
    """
    if not (parallel.tensor_parallel or parallel.context_parallel or parallel.experts):
        return
    was_training = parallel.model.training
    parallel.model.eval()
    try:
        difference = _difference(parallel, _one_sample(batch))
    finally:
        parallel.model.train(was_training)
    worst = torch.tensor(difference, dtype=torch.float64, device=parallel.mesh.world.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=parallel.mesh.world.group)
    if not float(worst) <= _TOLERANCE[parallel.layout.precision]:
        raise UnsupportedLayoutError(_text(parallel, float(worst)))


def _difference(parallel: ParallelModel, batch: Batch) -> float:
    """Return the largest relative difference of outputs and loss on this rank."""
    model, workload = parallel.model, parallel.workload
    with parallel.micro_batch(batch) as micro_batch:
        output = call_model(model, micro_batch.input)
        pair = _sum_and_count(workload, output, micro_batch.target)
    reshard(model)  # without a backward, the root module would stay gathered
    outputs = _tensors(parallel.gather_output(output))
    # rounding may change the choice of a router between two equally likely experts, which changes a few outputs
    worst = torch.median if workload.experts is not None else torch.max
    if parallel.context_parallel is not None:
        dist.all_reduce(pair, group=parallel.mesh.group("context"))
    whole, reading = _unsplit_model(parallel)
    with reading:
        output = call_model(whole.eval(), batch.input)
    reshard(model)
    difference = max(_differences(outputs, _tensors(output), worst), default=0.0)
    if parallel.context_parallel is None:
        return difference
    return max(difference, *_differences([pair], [_sum_and_count(workload, output, batch.target)]))


def _text(parallel: ParallelModel, difference: float) -> str:
    rules: list[str] = []
    if parallel.tensor_parallel is not None:
        rules.append(
            "tensor_plan: between colwise and rowwise every feature has to be treated alone or head by head (the "
            "number of heads -1 in views, no fused layers cut into pieces, no norm over split features)"
        )
    if parallel.context_parallel is not None:
        rules.append(
            "context: only attention may look from one position at another, positions have to be a part of the input, "
            "and the loss a sum over positions"
        )
    return f"the model computes something else in parts than as a whole (by {difference:.1e}); {'; '.join(rules)}"


def _one_sample(batch: Batch) -> Batch:
    """Return one sample of the batch, or the whole batch if the shapes do not show the batch dimension."""
    lengths: set[int] = set()
    map_tensors((batch.input, batch.target), lambda t: lengths.add(t.shape[0] if t.dim() else -1) or t)
    if lengths != {max(batch.size, 1)}:
        return batch
    inputs, target = (map_tensors(value, lambda tensor: tensor[:1]) for value in (batch.input, batch.target))
    return Batch(inputs, target, min(batch.size, 1), batch.start, batch.total)


def _unsplit_model(parallel: ParallelModel) -> tuple[nn.Module, contextlib.AbstractContextManager[object]]:
    """Return the whole model with the current weights, and the context to run it in."""
    if parallel.tensor_parallel is None and not parallel.experts:
        return parallel.model, contextlib.nullcontext()
    world = parallel.mesh.world
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(
        [world.device] if world.device.type == "cuda" else []
    ):  # building the model seeds the generators
        dtype = next(parallel.model.parameters()).dtype
        model = (
            on_meta(parallel.workload)
            if parallel.is_meta
            else init_model(parallel.workload, parallel.layout, world, dtype)[0]
        )
    random.setstate(before[0])
    np.random.set_state(before[1])
    if parallel.is_meta:
        return model, GatherOnUse(model, parallel.model)
    parts = parallel.model.state_dict()
    for name, tensor in state_tensors(model).items():
        with without_advice():
            tensor.copy_(full_tensor(parts[name]))  # one at a time, to avoid a second copy of all tensors
    return model, contextlib.nullcontext()


def _sum_and_count(workload: Workload, output: Any, target: Any) -> Tensor:
    """(sum, count) of the loss: float64, shape (2,)."""
    total, count = workload.loss(output, target)
    total = full_tensor(total)
    return torch.tensor([float(total), float(count)], dtype=torch.float64, device=total.device)


def _tensors(output: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    map_tensors(output, lambda tensor: tensors.append(tensor) or tensor)
    return tensors


def _differences(
    tensors: list[Tensor], expected: list[Tensor], worst: Callable[[Tensor], Tensor] = torch.max
) -> list[float]:
    """Return the `worst` difference of each tensor relative to its largest element."""
    if [tensor.shape for tensor in tensors] != [tensor.shape for tensor in expected]:
        return [float("inf")]
    return [
        float(worst(_distances(a, b, worst))) / max(*map(abs, map(float, b.aminmax())), 1e-30)
        for a, b in zip(tensors, expected, strict=True)
        if b.is_floating_point() and b.numel() and _is_finite(b)  # this check ignores outputs that are NaN
    ]


def _distances(tensor: Tensor, expected: Tensor, worst: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the elementwise distance in float64; for a maximum only that of each chunk, because logits are large."""
    pieces = zip(tensor.reshape(-1).split(_PIECE), expected.reshape(-1).split(_PIECE), strict=True)
    distances = ((a.double() - b.double()).abs() for a, b in pieces)
    return torch.cat([piece.max()[None] if worst is torch.max else piece for piece in distances])


def _is_finite(tensor: Tensor) -> bool:
    return all(bool(piece.isfinite().all()) for piece in tensor.reshape(-1).split(_PIECE))


# --- run a split model as a whole model: gather one parameter at a time

_OF_THE_SHAPE = ("shape", "dtype", "ndim", "requires_grad", "size", "dim", "numel", "is_floating_point")


class GatherOnUse(TorchFunctionMode):
    """While entered, `whole` (on the meta device) computes with the gathered values of `parts`.

    Each torch function that takes a parameter or buffer of `whole` gets the gathered tensor for this call only. This is
    a collective, so every rank has to run the model in the same order. Without gradients.
    """

    def __init__(self, whole: nn.Module, parts: nn.Module) -> None:
        super().__init__()
        local_tensors_by_name = {**dict(parts.named_parameters(remove_duplicate=False)), **dict(parts.named_buffers())}
        named = (*whole.named_parameters(remove_duplicate=False), *whole.named_buffers())
        self.parts = {id(tensor): local_tensors_by_name[name] for name, tensor in named}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name
        if name in _OF_THE_SHAPE:
            return func(*args, **(kwargs or {}))
        return func(*map_tensors(tuple(args), self._whole), **map_tensors(kwargs or {}, self._whole))

    def _whole(self, tensor: Tensor) -> Tensor:
        local = self.parts.get(id(tensor))
        if local is None:
            return tensor
        with without_advice():
            return full_tensor(local.detach())
