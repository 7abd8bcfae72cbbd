"""Mixed precision as Apex had it: autocast in the threads of DataParallel, optimizers that are not torch's."""

from __future__ import annotations

import dataclasses
import sys
import threading
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from everyrank import parse_layout
from everyrank.loop import open_data
from everyrank.parity import check_layout, parity_case
from everyrank.strategies import dataparallel
from everyrank.world import World, single_process_world


def in_a_thread(world: World, precision: str) -> list[str]:
    """What a copy of a model answers in a thread as `parallel_apply` makes them, on the CPU; and without ours."""
    found: list[str] = []
    here = single_process_world(world)
    layout = parse_layout(f"dataparallel:precision={precision}")
    model = nn.Linear(2, 2)
    for module in (dataparallel._SingleInput(model, layout, here), model):

        def run(module: nn.Module = module) -> None:
            with torch.amp.autocast("cpu", enabled=True):  # no dtype is handed on
                found.append(str(module(torch.ones(1, 2)).dtype))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    return found


def test_copies_of_dataparallel_compute_in_the_precision_asked_for(ranks: Any) -> None:
    """A thread has a dtype of its own: on a CPU bf16, on CUDA fp16, whatever the script has said."""
    assert ranks(1, in_a_thread, "fp16") == [["torch.float16", "torch.bfloat16"]]
    assert ranks(1, in_a_thread, "bf16") == [["torch.bfloat16", "torch.bfloat16"]]


class FusedAdam(torch.optim.Optimizer):
    """The interface of apex.optimizers.FusedAdam: the step in the group, a longer `step()`, groups that are empty."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8})

    @torch.no_grad()
    def step(
        self,
        closure: Any = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, (beta, gamma) = self.state[parameter], group["betas"]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        first = state["exp_avg"].lerp_(parameter.grad, 1 - beta) / (1 - beta ** group["step"])
        second = state["exp_avg_sq"].lerp_(parameter.grad**2, 1 - gamma) / (1 - gamma ** group["step"])
        parameter -= group["lr"] * first / (second.sqrt() + group["eps"])


def by_apex(model: nn.Module) -> torch.optim.Optimizer:
    from apex.optimizers import FusedAdam as Fused  # pyright: ignore

    return Fused([one for one in model.parameters() if one.requires_grad], lr=0.01)


def with_apex(world: World, layout: str) -> str:
    optimizers = types.ModuleType("apex.optimizers")
    optimizers.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    sys.modules |= {"apex": types.ModuleType("apex"), "apex.optimizers": optimizers}
    try:
        workload = dataclasses.replace(zoo.workload("frozen"), optimizer=by_apex)
        case = parity_case(workload, *open_data(workload, world), 6, is_quick=True)
        return check_layout(case, parse_layout(layout), world, f"apex/{layout}")[0].status
    finally:
        del sys.modules["apex"], sys.modules["apex.optimizers"]


@pytest.mark.parametrize("layout", ["ddp", "zero1", "fsdp"])
def test_an_optimizer_like_those_of_apex_is_taken(ranks: Any, layout: str) -> None:
    """A person's workload may return one; nothing here looks for Apex."""
    assert ranks(2, with_apex, layout) == ["equal", "equal"]


def fused(world: World, kind: str, layout: str) -> str:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        trained = [one for one in model.parameters() if one.requires_grad]
        return getattr(torch.optim, kind)(trained, lr=0.01, fused=True)

    workload = dataclasses.replace(zoo.workload("frozen"), optimizer=optimizer)
    case = parity_case(workload, *open_data(workload, world), 6, is_quick=True)
    return check_layout(case, parse_layout(layout), world, f"fused/{kind}/{layout}")[0].status


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_optimizers_of_torch_are_equal(ranks: Any, kind: str) -> None:
    """They have kernels for the CPU, too; under fsdp for sharded tensors."""
    for layout in ("ddp", "zero1", "fsdp"):
        assert ranks(2, fused, kind, layout) == ["equal", "equal"], layout
