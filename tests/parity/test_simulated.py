"""Layouts that are different algorithms are compared with a simulation of their ranks in one process."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import zoo
from everyrank import parse_layout
from everyrank.data import all_updates
from everyrank.data.order import epoch_order
from everyrank.errors import LayoutError
from everyrank.layout.options import LocalSGDOptions
from everyrank.loop import open_data, run_updates
from everyrank.parallel import compress, local_sgd, parallelize
from everyrank.parity import check_layout, parity_case
from everyrank.parity.reference import ensure_references
from everyrank.record import Parity
from everyrank.strategies import local_sgd as strategy
from everyrank.strategies import prepare
from everyrank.world import World
from parity.test_equal import in_float64

pytestmark = pytest.mark.integration

REPLICAS = ["ddp:batch_norm=local", "zero1:batch_norm=local", "fsdp:batch_norm=local"]
COMPRESSED = ["ddp:compress=fp16", "ddp:compress=bf16", "ddp:compress=powersgd", "ddp:compress=powersgd,matrix_rank=2"]
LOCAL = ["local_sgd", "local_sgd:every=3", "local_sgd:every=20"]


def check_all(world: World, key: str, name: str, optimizer: str, layouts: list[str], changes: dict[str, Any]) -> Any:
    """Return the parity of each layout. It runs in the ranks."""
    workload = zoo.workload(name, optimizer, **changes)
    case = parity_case(workload, *open_data(workload, world), steps=8)
    return [check_layout(case, parse_layout(text), world, f"{key}/{text}")[0] for text in layouts]


def statuses(ranks: Any, count: int, name: str, optimizer: str, layouts: list[str], **changes: Any) -> dict[str, str]:
    """Return the status of each layout. Each equal layout is compared with its simulation."""
    compared_layouts = layouts if count == 2 else in_float64(layouts)
    args = (f"{name}/{optimizer}", name, optimizer, compared_layouts, changes)
    parities: list[Parity] = ranks(count, check_all, *args)[0]
    assert all("simulation" in (parity.scope or "") for parity in parities if parity.status == "equal")
    return {text: parity.status for text, parity in zip(layouts, parities, strict=True)}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", ["tied", "norm"])
def test_equal_to_its_simulation(ranks: Any, count: int, name: str) -> None:
    """Three ranks have uneven batches. Batch norm is over the samples of each rank."""
    layouts = [*REPLICAS, *(f"{text},batch_norm=local" for text in COMPRESSED), *LOCAL]
    # batches of 8 leave 7 samples for the last one, so no rank has a single sample
    changes = {"global_batch": 8} if name == "norm" else {}
    assert statuses(ranks, count, name, "sgd", layouts, **changes) == dict.fromkeys(layouts, "equal")


def test_equal_to_its_simulation_with_adamw_and_micro_batches(ranks: Any) -> None:
    layouts = [
        "ddp:compress=bf16",
        "local_sgd:every=2",
        "local_sgd:every=3,accumulate=2",
        "fsdp:batch_norm=local,accumulate=2",
    ]
    assert statuses(ranks, 2, "tied", "adamw", layouts) == dict.fromkeys(layouts, "equal")


def compare_with_one_device(world: World, text: str, optimizer: str) -> Parity:
    """Compare local SGD with one device instead of its simulation."""
    workload = zoo.workload("tied", optimizer, clip_norm=None)
    case = parity_case(workload, *open_data(workload, world), steps=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalSGDOptions, "is_exact", lambda _: True)
        return check_layout(case, parse_layout(text), world, f"as-if-exact/{text}/{optimizer}")[0]


@pytest.mark.parametrize(
    ("text", "optimizer", "status"),
    [("local_sgd", "sgd", "equal"), ("local_sgd", "adamw", "different"), ("local_sgd:every=2", "sgd", "different")],
)
def test_only_sgd_averaged_after_each_update_is_equal_to_one_device(
    ranks: Any, text: str, optimizer: str, status: str
) -> None:
    """SGD has momentum and weight decay, and batches are uneven. Adam is different, because it is not linear."""
    parity = ranks(3, compare_with_one_device, text, optimizer)[0]
    assert parity.status == status, parity


def test_compression_with_synchronized_batch_norm_is_not_verified(ranks: Any) -> None:
    """One process cannot simulate this layout, so the status is not_verified."""
    assert statuses(ranks, 2, "norm", "sgd", ["ddp:compress=fp16"]) == {"ddp:compress=fp16": "not_verified"}


# --- mutations of the layout; its simulation is unchanged


def average_without_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give every rank the weight 1."""
    return lambda tensors, weight, world, *rest: original(tensors, torch.ones_like(weight), world, *rest)


MUTATIONS: dict[str, tuple[str, Any, str, Callable[[Any], Any]]] = {
    "statistics of all ranks": (
        "ddp:batch_norm=local",
        parallelize,
        "single_process_world",
        lambda _: lambda world: world,
    ),
    "running statistics of each rank": (
        "ddp:batch_norm=local",
        parallelize,
        "broadcast_statistics",
        lambda _: lambda *_: None,
    ),
    "a rank counts as much with fewer samples": ("local_sgd:every=2", local_sgd, "_average", average_without_weights),
    "parameters alone are averaged": (
        "local_sgd:every=2",
        local_sgd,
        "averaged_state",
        lambda _: lambda model, _: [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())],
    ),
    "the batch of all ranks is divided by": (
        "local_sgd:every=2",
        strategy,
        "local_update",
        lambda original: lambda trainable, local, batches: original(trainable, local * 2, batches),
    ),
    "errors are not kept": (
        "ddp:compress=powersgd,batch_norm=local",
        compress,
        "_power_step_over_ranks",
        lambda original: (
            lambda matrices, world: (
                original(matrices, world),
                [factors.error.zero_() for _, factors in matrices],
            )
        ),
    ),
    "every rank draws its own Q": (
        "ddp:compress=powersgd,batch_norm=local",
        compress,
        "initial_factors",
        lambda original: (
            lambda parameter, r, number: original(parameter, r, number + torch.distributed.get_rank() * 100)
        ),
    ),
    "the sum for the mean": (
        "ddp:compress=fp16,batch_norm=local",
        compress,
        "_mean_of_rounded_over_ranks",
        lambda original: (
            lambda gradients, dtype, world: (
                original(gradients, dtype, world),
                [gradient.mul_(world.size) for gradient in gradients],
            )
        ),
    ),
}


def check_mutation(world: World, name: str) -> Parity:
    """Return the parity under this mutation, which is applied after the reference has run.

    Batches are uneven, with batch norm and momentum.
    """
    text, module, attribute, change = MUTATIONS[name]
    workload, layout = zoo.workload("norm", global_batch=8), parse_layout(text)
    case = parity_case(workload, *open_data(workload, world), steps=8)
    ensure_references(case, layout, world, f"{name}/reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, attribute, change(getattr(module, attribute)))
        return check_layout(case, layout, world, name)[0]


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_detected(ranks: Any, name: str) -> None:
    assert ranks(2, check_mutation, name)[0].status == "different"


# --- comparison with torch


def differences_from_torch_powersgd(world: World) -> list[Tensor]:
    """Return the relative differences between torch's PowerSGD gradients of a matrix and ours.

    Both start from the same Q.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(24, 16, bias=False).double()
    ddp = DistributedDataParallel(model, process_group=world.group)
    state = PowerSGDState(world.group, matrix_approximation_rank=2, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook)
    factors: compress.Factors | None = None
    differences: list[Tensor] = []
    generator = torch.Generator().manual_seed(world.rank)
    for update in range(5):
        inputs = torch.randn(8, 24, generator=generator, dtype=torch.float64)
        ddp.zero_grad()
        ddp(inputs).square().sum().backward()
        assert model.weight.grad is not None
        if update >= 2:
            torch_gradient = model.weight.grad.clone()
            gradient = (2 * inputs.T @ (inputs @ model.weight.detach().T)).T.contiguous()
            if factors is None:
                # the initial Q of torch is not accessible, so start from its state after the first step
                [q], [error] = state.q_memory_dict.values(), state.error_dict.values()
                factors = compress.Factors(q.view(24, 2).clone(), error.view(16, 24).clone())
                continue
            compress._power_step_over_ranks([(gradient, factors)], world)
            differences.append((gradient - torch_gradient).abs().max() / torch_gradient.abs().max())
    return differences


def test_powersgd_is_equal_to_that_of_torch(ranks: Any) -> None:
    for differences in ranks(2, differences_from_torch_powersgd):
        assert len(differences) == 2
        assert all(float(difference) < 1e-10 for difference in differences)


# --- a loss that is NaN on one rank


def losses_with_nan(world: World) -> list[list[float]]:
    """Return the local (sum, count) of updates in which the loss of the first sample is NaN."""
    data = zoo.Points(8)
    first_target = data.targets[int(epoch_order(8, 0, 0)[0])]

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        is_bad = bool((target == first_target).all(1).any())
        return (output - target).square().sum() * (math.nan if is_bad else 1.0), target.numel()

    workload = zoo.workload("frozen", model=zoo.model_without_counter, loss=loss, global_batch=4)
    prepared = prepare(workload, parse_layout("local_sgd:every=2"), world)
    return [local_loss.tolist() for local_loss in run_updates(prepared, data, list(all_updates(2, 2)))]


def test_loss_that_is_nan_on_one_rank_is_returned_on_all(ranks: Any) -> None:
    """The other rank waits in the average, so no rank can end alone. The loop raises after the sum of the losses."""
    for rank, local_losses in enumerate(ranks(2, losses_with_nan)):
        assert [math.isnan(loss_sum) for loss_sum, _ in local_losses] == [rank == 0, False]


# --- unsupported options


@pytest.mark.parametrize(
    ("text", "expected_text"),
    [
        ("local_sgd:every=0", "every=0: give at least 1"),
        ("local_sgd:precision=fp16", "use precision=bf16"),
        ("fsdp:compress=fp16", "no key 'compress'"),
        ("ddp:compress=zip", "none, fp16, bf16, powersgd"),
        ("ddp:compress=fp16,tensor=2", "leave it out, or tensor"),
        ("ddp:matrix_rank=2", "matrix_rank is for compress=powersgd"),
        ("ddp:batch_norm=local,context=2", "leave out batch_norm=local"),
        ("ddp:simulated=2", "for others use single"),
    ],
)
def test_unsupported_options_are_refused(text: str, expected_text: str) -> None:
    with pytest.raises(LayoutError, match=f"^layout [^\n]*{re.escape(expected_text)}[^\n]*$"):
        parse_layout(text)
