"""Inspect the model and data of a workload: build them once and run one small batch."""

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

    samples           of the training data
    call              how the model takes an input: "", "*" or "**" in front of it
    is_nested         inputs or targets are more than one tensor
    floats            whether input and target are floating-point numbers
    draws_in_data     a sample draws at random
    draws_in_model    the model's forward does
    has_batch_norm    some statistics span the samples of a batch
    follows_plateau   the schedule follows the evaluation
    num_args          of each module of the tensor plan that hands its input on ("gather"): positional arguments
    stages            of a pipeline: the blocks of each rank
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
    value, target = pair_of((workload.collate or default_collate)(samples))
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
    """Raise `UsageError` for batch norm that a project would not compute as `everyrank train` does."""
    layout, is_local = request.layout, request.has_local_norm
    if not norms or is_local:
        return
    if layout.strategy in ("dataparallel", "horovod"):
        raise UsageError(
            f"--layout {layout}: {layout.strategy} normalises the samples of each device by themselves; add "
            "batch_norm=local, or use ddp, whose batch norm spans all ranks"
        )
    if layout.precision in ("bf16", "fp16"):
        raise UsageError(
            f"--layout {layout}: eject does not write batch norm over ranks in {layout.precision}; under ddp add "
            "batch_norm=local"
        )
    if any(not norm.affine or not norm.track_running_stats for norm in norms):
        raise UsageError("batch norm without weights or running statistics: eject does not write it over ranks")


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _watched(call: Callable[[], Any]) -> tuple[Any, bool]:
    """Return the result of a call, and whether it used torch's, Python's or numpy's generator."""
    before = _generators()
    result = call()
    return result, _generators() != before


def _generators() -> tuple[Any, ...]:
    of_numpy: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), of_numpy[1].tolist(), of_numpy[2]


def _resolved(workload: Workload, model: nn.Module, request: EjectRequest) -> dict[str, str]:
    """Return module -> style of the tensor plan; {} under other layouts."""
    if request.kind != "tensor":
        return {}
    plan = resolve(model, workload.tensor_plan or {})
    for name, word in plan.items():
        check_module(name, model.get_submodule(name), word, request.processes)
        if word == "replicate_sum":
            raise UsageError(f"tensor_plan: {name!r}: eject does not write replicate_sum; use fsdp")
    return plan


def _watch_arguments(model: nn.Module, plan: dict[str, str]) -> dict[str, int]:
    """Return a dict that the next forward fills with the number of positional arguments of gathering modules."""
    counts: dict[str, int] = {}

    def watch(name: str) -> Callable[..., None]:
        return lambda _, args: counts.update({name: len(args)})

    for name, word in plan.items():
        if word == "gather":
            model.get_submodule(name).register_forward_pre_hook(watch(name))
    return counts


def _check_block_call(block: nn.Module, args: tuple[Any, ...]) -> None:
    if not args:
        raise UsageError(f"the model calls {type(block).__name__} by keywords alone; give what goes through first")


def _forward(workload: Workload, model: nn.Module, value: Any, target: Any, request: EjectRequest) -> bool:
    """Run forward and backward of a small batch. Returns whether forward draws random numbers."""
    as_model = next((p.dtype for p in model.parameters()), torch.float32)

    def change(tensor: Tensor) -> Tensor:
        return tensor.to(as_model) if tensor.is_floating_point() else tensor

    output, draws = _watched(lambda: call_model(model, map_tensors(value, change)))
    workload.loss(output, map_tensors(target, change))[0].backward()
    options = request.layout.options
    if not (options.get("find_unused") or options.get("static_graph")):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.grad is None and request.kind != "tensor":
                raise UsageError(f"parameter {name} took no part in the loss of two samples; freeze it, or take it out")
    return draws


def _call(model: nn.Module, value: Any) -> str:
    """Find out how the model takes this input by calling a stub that records the call."""

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
    inside = {id(module) for block in find_blocks(workload, model) for module in block.modules()}
    for tie in ties:
        places = " and ".join(f"{module}.{name}" for module, name in tie)
        if kind == "tensor":
            raise UsageError(f"{places} are one weight, which parallelize_module unties; eject does not tie it again")
        if any(id(model.get_submodule(module)) in inside for module, _ in tie) and kind != "ddp" and kind != "zero1":
            raise UsageError(f"{places} are one weight, in a block of its own here; eject writes that under ddp alone")
    if kind in ("fsdp", "hsdp") and any(parameter.dim() == 0 for parameter in model.parameters()):
        raise UsageError("a parameter without dimensions cannot be sharded; give it the shape (1,)")
    if kind in ("tensor", "pipeline") and has_norms:
        raise UsageError(f"--layout {request.layout}: eject does not write batch norm there; use ddp or fsdp")
    if kind == "pipeline" and not isinstance(model.get_submodule(workload.blocks or ""), nn.ModuleList | nn.Sequential):
        raise UsageError(f"blocks={workload.blocks!r}: eject cuts an nn.ModuleList or an nn.Sequential")


def _stages(workload: Workload, model: nn.Module, request: EjectRequest) -> list[range]:
    """Return the blocks of each rank, split as `everyrank train` does."""
    blocks = find_blocks(workload, model)
    if len(blocks) < request.processes:
        raise UsageError(f"--processes {request.processes}: there are {len(blocks)} blocks; give at most that many")
    inside = {module for block in blocks for module in block.modules()}
    costs = [cost(block) for block in blocks]
    costs[-1] += sum(own_cost(module) for module in model.modules() if module not in inside)
    return balance(costs, request.processes)
