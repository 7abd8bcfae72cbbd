"""Inspects the model and data of a workload: builds them once and runs one small batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import default_collate

from everyrank.data.fetch import map_tensors, pair_of
from everyrank.eject.request import EjectRequest
from everyrank.errors import UsageError
from everyrank.parallel.batch_norm import find_batch_norms
from everyrank.parallel.init_model import seed_everything, shared_parameters
from everyrank.parallel.parallelize import call_model, find_blocks
from everyrank.parallel.pipeline.balance import balance, cost, own_cost
from everyrank.parallel.tensor.plan import check_module, resolve
from everyrank.workload import Workload

__all__ = ["Facts", "look_at"]


@dataclass(frozen=True)
class Facts:
    """The facts about a workload that train.py depends on.

    samples           number of training samples
    call              what precedes the input in a call of the model: "", "*" or "**"
    is_nested         inputs or targets are more than one tensor
    floats            whether input and target are floating-point numbers
    draws_in_data     loading a sample draws random numbers
    draws_in_model    the model's forward draws random numbers
    has_batch_norm    the model has batch norm
    follows_plateau   the schedule is ReduceLROnPlateau
    num_args          "gather" modules of the tensor plan -> number of positional arguments
    stages            the blocks of each rank of a pipeline
    """

    samples: int
    call: str
    is_nested: bool
    floats: tuple[bool, bool]
    draws_in_data: bool
    draws_in_model: bool
    has_batch_norm: bool
    follows_plateau: bool
    num_args: dict[str, int]
    stages: list[range]


def look_at(workload: Workload, request: EjectRequest) -> Facts:
    """Build model and data and run two samples. Raises `UsageError` for a workload that cannot be ejected.

    Exceptions of user code propagate.
    """
    seed_everything(workload.seed)
    data: Any = workload.train_data()
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise UsageError(f"workload {workload.name}: eject does not support streams; use a train_data with __len__")
    is_silent = getattr(data, "deterministic", False)
    samples, draws_in_data = _watched(lambda: [data[index % len(data)] for index in range(2)])
    value, target = pair_of((workload.collate or default_collate)(samples), has_collate=workload.collate is not None)
    seed_everything(workload.seed)
    model = workload.model().train()
    optimizer = workload.optimizer(model)
    schedule = workload.schedule(optimizer) if workload.schedule else None
    num_args = _watch_arguments(model, _resolved(workload, model, request))
    if request.kind == "pipeline":
        for block in find_blocks(workload, model):
            block.register_forward_pre_hook(_check_block_call)
    draws_in_model = _forward(workload, model, value, target, request)
    norms: list[Any] = find_batch_norms(model)
    _refuse_norms(norms, request)
    _refuse_model(workload, model, request, bool(norms))
    return Facts(
        samples=len(data),
        call=_call(model, value),
        is_nested=not isinstance(value, Tensor) or not isinstance(target, Tensor),
        floats=(_is_float(value), _is_float(target)),
        draws_in_data=draws_in_data and not is_silent,
        draws_in_model=draws_in_model,
        has_batch_norm=bool(norms),
        follows_plateau=isinstance(schedule, ReduceLROnPlateau),
        num_args=num_args,
        stages=_stages(workload, model, request) if request.kind == "pipeline" else [],
    )


def _refuse_norms(norms: list[Any], request: EjectRequest) -> None:
    """Raise `UsageError` for batch norm that a project would compute differently from `everyrank train`."""
    layout, is_local = request.layout, request.has_local_norm
    if not norms or is_local:
        return
    if layout.strategy in ("dataparallel", "horovod"):
        raise UsageError(
            f"--layout {layout}: {layout.strategy} normalises the samples of each device separately; add "
            "batch_norm=local, or use ddp, whose batch norm spans all ranks"
        )
    if layout.precision in ("bf16", "fp16"):
        raise UsageError(
            f"--layout {layout}: eject does not support batch norm over ranks in {layout.precision}; under ddp add "
            "batch_norm=local"
        )
    if any(not norm.affine or not norm.track_running_stats for norm in norms):
        raise UsageError("batch norm without weights or running statistics: eject does not support it over ranks")


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _watched(call: Callable[[], Any]) -> tuple[Any, bool]:
    """Return the result of a call, and whether it used torch's, Python's or numpy's generator."""
    states_before = _generators()
    result = call()
    return result, _generators() != states_before


def _generators() -> tuple[Any, ...]:
    numpy_state: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist(), numpy_state[2]


def _resolved(workload: Workload, model: nn.Module, request: EjectRequest) -> dict[str, str]:
    """Return the tensor plan, module -> style; {} under other layouts."""
    if request.kind != "tensor":
        return {}
    plan = resolve(model, workload.tensor_plan or {})
    for name, style in plan.items():
        check_module(name, model.get_submodule(name), style, request.processes)
        if style == "replicate_sum":
            raise UsageError(f"tensor_plan: {name!r}: eject does not support replicate_sum; use fsdp")
    return plan


def _watch_arguments(model: nn.Module, plan: dict[str, str]) -> dict[str, int]:
    """Return a dict that the next forward fills with the number of positional arguments of gathering modules."""
    counts: dict[str, int] = {}

    def watch(name: str) -> Callable[..., None]:
        return lambda _, args: counts.update({name: len(args)})

    for name, style in plan.items():
        if style == "gather":
            model.get_submodule(name).register_forward_pre_hook(watch(name))
    return counts


def _check_block_call(block: nn.Module, args: tuple[Any, ...]) -> None:
    if not args:
        raise UsageError(
            f"the model calls {type(block).__name__} with keyword arguments only; pass the first by position"
        )


def _forward(workload: Workload, model: nn.Module, value: Any, target: Any, request: EjectRequest) -> bool:
    """Run forward and backward of a small batch. Returns whether forward draws random numbers."""
    dtype = next((p.dtype for p in model.parameters()), torch.float32)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    output, draws = _watched(lambda: call_model(model, map_tensors(value, cast)))
    workload.loss(output, map_tensors(target, cast))[0].backward()
    options = request.layout.options
    if not (options.get("find_unused") or options.get("static_graph")):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.grad is None and request.kind != "tensor":
                raise UsageError(f"parameter {name} got no gradient from two samples; freeze or remove it")
    return draws


def _call(model: nn.Module, value: Any) -> str:
    """Return what precedes the input in a call of the model, by calling a stub that records the call."""

    class Probe(type(model)):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return "**" if kwargs else "*" if len(args) != 1 or args[0] is not value else ""

    original = type(model)
    model.__class__ = Probe
    try:
        return call_model(model, value, original)
    finally:
        model.__class__ = original


def _refuse_model(workload: Workload, model: nn.Module, request: EjectRequest, has_norms: bool) -> None:
    """Raise `UsageError` for a model that a plain script would silently train wrongly."""
    ties, kind = shared_parameters(model), request.kind
    modules_in_blocks = {id(module) for block in find_blocks(workload, model) for module in block.modules()}
    for tie in ties:
        names = " and ".join(f"{module}.{name}" for module, name in tie)
        if kind == "tensor":
            raise UsageError(
                f"{names} are one weight, which parallelize_module unties, and eject does not tie it again; use fsdp"
            )
        if (
            any(id(model.get_submodule(module)) in modules_in_blocks for module, _ in tie)
            and kind != "ddp"
            and kind != "zero1"
        ):
            raise UsageError(
                f"{names} are one weight, which is in a block; eject supports that only under ddp and zero1"
            )
    if kind in ("fsdp", "hsdp") and any(parameter.dim() == 0 for parameter in model.parameters()):
        raise UsageError("a parameter without dimensions cannot be sharded; give it the shape (1,)")
    if kind in ("tensor", "pipeline") and has_norms:
        raise UsageError(f"--layout {request.layout}: eject does not support batch norm here; use ddp or fsdp")
    if kind == "pipeline" and not isinstance(model.get_submodule(workload.blocks or ""), nn.ModuleList | nn.Sequential):
        raise UsageError(
            f"blocks={workload.blocks!r}: it is not an nn.ModuleList or nn.Sequential, and eject only splits those"
        )


def _stages(workload: Workload, model: nn.Module, request: EjectRequest) -> list[range]:
    """Return the blocks of each rank, split as `everyrank train` does."""
    blocks = find_blocks(workload, model)
    if len(blocks) < request.processes:
        raise UsageError(
            f"--processes {request.processes}: there are only {len(blocks)} blocks; give at most that many"
        )
    modules_in_blocks = {module for block in blocks for module in block.modules()}
    costs = [cost(block) for block in blocks]
    costs[-1] += sum(own_cost(module) for module in model.modules() if module not in modules_in_blocks)
    return balance(costs, request.processes)
