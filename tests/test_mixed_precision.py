"""Mixed precision: autocast in the threads of DataParallel, optimizers of Apex, and fused optimizers."""

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


def output_dtypes_in_threads(world: World, precision: str) -> list[str]:
    """Return output dtypes of a model copy in a thread like those of `parallel_apply`: with our wrapper, and without.

    The threads run on the CPU.
    """
    dtypes: list[str] = []
    single_world = single_process_world(world)
    layout = parse_layout(f"dataparallel:precision={precision}")
    model = nn.Linear(2, 2)
    for module in (dataparallel._SingleInput(model, layout, single_world), model):

        def run(module: nn.Module = module) -> None:
            with torch.amp.autocast("cpu", enabled=True):  # parallel_apply does not pass on the dtype
                dtypes.append(str(module(torch.ones(1, 2)).dtype))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    return dtypes


def test_copies_of_dataparallel_use_the_precision_of_the_layout(ranks: Any) -> None:
    """Without the wrapper, a new thread uses the default autocast dtype: bf16 on CPU, fp16 on CUDA."""
    assert ranks(1, output_dtypes_in_threads, "fp16") == [["torch.float16", "torch.bfloat16"]]
    assert ranks(1, output_dtypes_in_threads, "bf16") == [["torch.bfloat16", "torch.bfloat16"]]


class FusedAdam(torch.optim.Optimizer):
    """An optimizer with the interface of apex.optimizers.FusedAdam.

    The group has the step number, `step()` has more arguments than torch's, and groups may be empty.
    """

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


def apex_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    from apex.optimizers import FusedAdam as Fused  # pyright: ignore

    return Fused([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)


def status_with_apex(world: World, layout: str) -> str:
    """Verify a layout with an optimizer from a simulated apex package. Return the status."""
    optimizers = types.ModuleType("apex.optimizers")
    optimizers.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    sys.modules |= {"apex": types.ModuleType("apex"), "apex.optimizers": optimizers}
    try:
        workload = dataclasses.replace(zoo.workload("frozen"), optimizer=apex_optimizer)
        case = parity_case(workload, *open_data(workload, world), 6, is_quick=True)
        return check_layout(case, parse_layout(layout), world, f"apex/{layout}")[0].status
    finally:
        del sys.modules["apex"], sys.modules["apex.optimizers"]


@pytest.mark.parametrize("layout", ["ddp", "zero1", "fsdp"])
def test_optimizer_with_the_interface_of_apex_is_equal(ranks: Any, layout: str) -> None:
    """A workload may return such an optimizer. everyrank has no code for Apex."""
    assert ranks(2, status_with_apex, layout) == ["equal", "equal"]


def status_with_fused_optimizer(world: World, kind: str, layout: str) -> str:
    """Verify a layout with a fused optimizer of torch. Return the status."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return getattr(torch.optim, kind)(parameters, lr=0.01, fused=True)

    workload = dataclasses.replace(zoo.workload("frozen"), optimizer=optimizer)
    case = parity_case(workload, *open_data(workload, world), 6, is_quick=True)
    return check_layout(case, parse_layout(layout), world, f"fused/{kind}/{layout}")[0].status


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_optimizers_of_torch_are_equal(ranks: Any, kind: str) -> None:
    """They have kernels for the CPU, too, and with fsdp, for sharded tensors."""
    for layout in ("ddp", "zero1", "fsdp"):
        assert ranks(2, status_with_fused_optimizer, kind, layout) == ["equal", "equal"], layout
