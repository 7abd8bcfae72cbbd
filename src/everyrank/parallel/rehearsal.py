"""Before the first update: does the model say the same in parts as it does as a whole?

Splitting matrices or sequences changes what runs, and a model can be such that it still runs and is another one: heads
counted in a view, positions counted on a part of a sequence, a mean over positions. Watching for each of these by name
would never be complete. So one sample goes through both, and outputs and loss are compared.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from everyrank.data import Batch
from everyrank.data.loader import map_tensors
from everyrank.errors import UnfitError
from everyrank.layout import Layout
from everyrank.parallel.build import Built, call
from everyrank.parallel.construct import construct
from everyrank.parallel.mesh import local
from everyrank.parallel.shard import reshard
from everyrank.parallel.state import without_advice
from everyrank.workload import Workload

__all__ = ["rehearse", "without_rehearsal"]

# of the largest output; what splitting changes by rounding is far below, what it breaks far above
_TOLERANCE = {"float64": 1e-6, "float32": 1e-4, "bf16": 5e-2, "fp16": 2e-2}


_left_out: list[bool] = []


@contextlib.contextmanager
def without_rehearsal() -> Generator[None]:
    """For whoever measures the memory of what has been checked already: the whole model would count in it."""
    _left_out.append(True)
    try:
        yield
    finally:
        _left_out.pop()


@torch.no_grad()
def rehearse(workload: Workload, layout: Layout, built: Built, batch: Batch) -> None:
    """Compare one sample of the batch in parts and as a whole. A collective of all ranks, before the first update.

    The whole model is put together for it for a moment where matrices are split; with meta=true, which says that it
    does not fit, nothing is compared. Raises `UnfitError` on every rank alike.
    """
    if (built.tensor is None and built.context is None) or layout.options.get("meta") or _left_out:
        return
    batch = _one(batch)
    was_training = built.model.training
    built.model.eval()
    try:
        with built.passing(batch) as part:
            output = call(built.model, part.input)
            pair = _pair(workload, output, part.target)
        reshard(built.model)  # no backward follows that would
        found = _tensors(built.whole(output))
        if built.context is not None:
            dist.all_reduce(pair, group=built.mesh.group("context"))
        whole = _whole(workload, layout, built) if built.tensor is not None else built.model
        output = call(whole.eval(), batch.input)
        reshard(built.model)
        expected = _tensors(output)
        difference = max(_differences(found, expected), default=0.0)
        if built.context is not None:
            difference = max(difference, *_differences([pair], [_pair(workload, output, batch.target)]))
    finally:
        built.model.train(was_training)
    worst = torch.tensor(difference, dtype=torch.float64, device=built.mesh.world.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=built.mesh.world.group)
    if not float(worst) <= _TOLERANCE[layout.precision]:
        raise UnfitError(_text(built, float(worst)))


def _text(built: Built, difference: float) -> str:
    rules: list[str] = []
    if built.tensor is not None:
        rules.append(
            "tensor_plan: between colwise and rowwise every feature has to be treated alone or head by head (the "
            "number of heads -1 in views, no fused layers cut into pieces, no norm over split features)"
        )
    if built.context is not None:
        rules.append(
            "context: only attention may look from one position at another, positions have to be a part of the input, "
            "and the loss a sum over positions"
        )
    return f"the model computes something else in parts than as a whole (by {difference:.1e}); {'; '.join(rules)}"


def _one(batch: Batch) -> Batch:
    """One sample of the batch, where that can be told from the shapes; else all of it."""
    lengths: set[int] = set()
    map_tensors((batch.input, batch.target), lambda t: lengths.add(t.shape[0] if t.dim() else -1) or t)
    if lengths != {max(batch.size, 1)}:
        return batch
    inputs, target = (map_tensors(value, lambda tensor: tensor[:1]) for value in (batch.input, batch.target))
    return Batch(inputs, target, min(batch.size, 1), batch.start, batch.total)


def _whole(workload: Workload, layout: Layout, built: Built) -> nn.Module:
    """The model in one piece, with the weights that it has now."""
    world = built.mesh.world
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):  # building seeds them
        model, _ = construct(workload, layout, world, next(built.model.parameters()).dtype)
    random.setstate(before[0])
    np.random.set_state(before[1])
    state: dict[str, Tensor] = {}
    for name, tensor in built.model.state_dict().items():
        with without_advice():
            state[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    model.load_state_dict(state)
    return model


def _pair(workload: Workload, output: Any, target: Any) -> Tensor:
    total, count = workload.loss(output, target)
    total = total.full_tensor() if isinstance(total, DTensor) else total
    return torch.tensor([float(total), float(count)], dtype=torch.float64, device=local(total).device)


def _tensors(output: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(output, lambda tensor: found.append(tensor) or tensor)
    return found


def _differences(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """How far each tensor is off, relative to the largest number in it."""
    if [tensor.shape for tensor in found] != [tensor.shape for tensor in expected]:
        return [float("inf")]
    return [
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))
        for a, b in zip(found, expected, strict=True)
        if b.is_floating_point() and b.numel() and bool(b.isfinite().all())  # a model that says NaN is no matter here
    ]
