"""Synchronous parameter servers are equal to one device.

Asynchronous ones are equal to a simulation in one process with the same order of updates.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import zoo
from everyrank import parse_layout
from everyrank.data import all_updates
from everyrank.loop import open_data, run_updates
from everyrank.parallel.server import asynchronous
from everyrank.parallel.server.link import ServerLink
from everyrank.parity import check_layout, trace
from everyrank.parity.reference import ensure_references
from everyrank.record import Parity
from everyrank.strategies import parameter_server, prepare
from everyrank.world import World, single_process_world
from everyrank.world.collectives import all_equal, sum_over_ranks
from parity.test_equal import assert_equal, parities
from parity.test_mutations import batch_norm_alone, epoch_not_set, padding_sample_counts, same_slice
from processes import Cli

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(("count", "optimizer"), [(2, "sgd"), (3, "adamw"), (4, "sgd")])
@pytest.mark.parametrize("name", ["tied", "frozen", "norm", "augmented", "unused"])
def test_synchronous_equals_one_device(ranks: Any, count: int, name: str, optimizer: str) -> None:
    """There are one and two servers, uneven batches, batch norm and clipping.

    The workloads have masks, buffers, and tied, frozen and unused parameters.
    """
    layouts = ["parameter_server", "parameter_server:servers=2"][: count - 1]
    assert_equal(layouts, parities(ranks, count, name, optimizer, layouts))


@pytest.mark.parametrize("name", ["tied", "frozen", "norm"])
def test_synchronous_with_micro_batches(ranks: Any, name: str) -> None:
    """Some micro-batches have fewer samples than there are trainers. Blocks are also recomputed."""
    changes: dict[str, Any] = {
        "tied": {},
        "frozen": {"model": zoo.model_without_counter},
        "norm": {"global_batch": 12},  # micro-batches of one sample have no variance
    }[name]
    layouts = ["parameter_server:accumulate=3", "parameter_server:servers=2,accumulate=3,recompute"]
    if name == "frozen":  # it has no blocks
        layouts = layouts[:1]
    assert_equal(layouts, parities(ranks, 4, name, "sgd", layouts, **changes))


@pytest.mark.parametrize("name", ["tied", "norm"])
def test_low_precision_is_within_the_tolerance_band(ranks: Any, name: str) -> None:
    layouts = ["parameter_server:precision=bf16"]
    assert_equal(layouts, parities(ranks, 3, name, "sgd", layouts))


Patch = contextlib.AbstractContextManager[Any]


def _patch_link(name: str, replacement: Callable[..., Any]) -> Patch:
    """Replace a method of ServerLink by `replacement(original, link, ...)`."""
    original = getattr(ServerLink, name)
    return mock.patch.object(ServerLink, name, lambda link, *args: replacement(original, link, *args))


def _patch_optimizer_step(step: Callable[..., None]) -> Patch:
    """Replace the optimizer steps of the server by `step(original, total, **kwargs)`."""
    original_make = parameter_server.make_trainable

    def make_trainable(*args: Any) -> Any:
        trainable = original_make(*args)
        original = trainable.optimizer_step
        trainable.optimizer_step = lambda total, **kwargs: step(original, total, **kwargs)
        return trainable

    return mock.patch.object(parameter_server, "make_trainable", make_trainable)


def mean_of_means(_: str, world: World) -> Patch:
    """Each trainer averages over its own slice, and the server averages these means without weights."""

    def push(original: Any, link: ServerLink, sum_and_count: torch.Tensor) -> None:
        if float(sum_and_count[1]):
            for parameter in (parameter for parameters in link.parts for parameter in parameters):
                if parameter.grad is not None:
                    parameter.grad /= sum_and_count[1]
        original(link, sum_and_count)

    def step(original: Any, total: torch.Tensor, **kwargs: Any) -> None:
        original(torch.stack([total[0], torch.tensor(world.size - 1.0, dtype=torch.float64)]), **kwargs)

    stack = contextlib.ExitStack()
    stack.enter_context(_patch_link("push", push))
    stack.enter_context(_patch_optimizer_step(step))
    return stack


def second_push_late(_: str, world: World) -> Patch:
    """Gradients that the second trainer pushes are applied one update late."""
    pushes: list[list[Any]] = []

    def add_gradients(original: Any, link: ServerLink, trainer: int, head: torch.Tensor) -> None:
        before = [None if p.grad is None else p.grad.clone() for p in link.server_parameters]
        original(link, trainer, head)
        if trainer == 2:
            pairs = list(zip(link.server_parameters, before, strict=True))
            pushes.append([p.grad if previous is None else p.grad - previous for p, previous in pairs])
            for index, (parameter, previous) in enumerate(pairs):
                late_gradient = pushes[-2][index] if len(pushes) > 1 else torch.zeros_like(parameter)
                parameter.grad = late_gradient.clone() if previous is None else previous + late_gradient

    return _patch_link("add_gradients", add_gradients)


def first_push_alone(_: str, world: World) -> Patch:
    """The server uses only the first push of an update, and drops the others."""

    def add_gradients(original: Any, link: ServerLink, trainer: int, head: torch.Tensor) -> None:
        before = [None if p.grad is None else p.grad.clone() for p in link.server_parameters]
        original(link, trainer, head)
        if trainer > 1:
            for parameter, previous in zip(link.server_parameters, before, strict=True):
                parameter.grad = previous

    return _patch_link("add_gradients", add_gradients)


def never_pulled(_: str, world: World) -> Patch:
    """Trainers keep their initial parameters."""

    def pull(original: Any, link: ServerLink) -> None:
        local_values = [parameter.detach().clone() for parameter in link.mesh_parameters()]
        original(link)
        for parameter, local_value in zip(link.mesh_parameters(), local_values, strict=True):
            parameter.data.copy_(local_value)

    stack = contextlib.ExitStack()
    all_parameters = lambda link: [param for parameters in link.parts for param in parameters]  # noqa: E731
    stack.enter_context(mock.patch.object(ServerLink, "mesh_parameters", all_parameters, create=True))
    stack.enter_context(_patch_link("pull", pull))
    return stack


def averaged_once_too_often(_: str, world: World) -> Patch:
    """The sum over all terms is also divided by the number of trainers."""
    return _patch_optimizer_step(
        lambda original, total, **kwargs: original(total * torch.tensor([1.0, world.size - 1.0]), **kwargs)
    )


def clipped_by_own_norm(_: str, world: World) -> Patch:
    """Each server clips by the norm of its own parameters."""
    return _patch_optimizer_step(lambda original, total, **_: original(total))


# mutation, workload, ranks, keys of the layout, text of the cause
MUTATIONS: list[tuple[Any, str, int, str, str]] = [
    (mean_of_means, "tied", 3, "", "not the sum over all samples"),
    (second_push_late, "frozen", 3, "", "not the sum over all samples"),
    (first_push_alone, "frozen", 3, "", "not the sum over all samples"),
    (never_pulled, "frozen", 3, "", ""),
    (averaged_once_too_often, "frozen", 4, "", "divided by the ranks once too often"),
    (clipped_by_own_norm, "tied", 3, ",servers=2", ""),
    (same_slice, "frozen", 3, "", "samples"),
    (epoch_not_set, "frozen", 3, "", "set_epoch"),
    (batch_norm_alone, "norm", 3, "", "batch norm"),
    (padding_sample_counts, "norm", 4, "", ""),
]


@pytest.mark.parametrize(
    ("mutation", "name", "count", "keys", "cause"), MUTATIONS, ids=[mutation.__name__ for mutation, *_ in MUTATIONS]
)
def test_mutation_is_detected(ranks: Any, mutation: Any, name: str, count: int, keys: str, cause: str) -> None:
    """The result is different, with the first divergence and the cause."""
    parity = ranks(count, check, mutation, name, keys)[0]
    assert parity.status == "different"
    assert parity.first_divergence
    assert cause in (parity.cause or ""), parity


def check(world: World, mutation: Any, name: str, keys: str) -> Parity:
    """Return the parity of a parameter server under this mutation."""
    changes: dict[str, Any] = {"clip_norm": 0.05 if mutation is clipped_by_own_norm else None}
    if mutation is batch_norm_alone:
        changes["global_batch"] = 8
    case = zoo.cached_parity_case(world, name, "sgd", **changes)
    layout = parse_layout(f"parameter_server:precision=float64{keys}")
    key = f"mutation/{mutation.__name__}"
    ensure_references(case, layout, world, f"{key}/single")  # it runs unpatched
    with mutation("parameter_server", world):
        return check_layout(case, layout, world, key)[0]


# --- asynchronous

ASYNC = "parameter_server:updates=async"


@pytest.mark.parametrize(("count", "optimizer"), [(2, "adamw"), (3, "adamw"), (4, "sgd")])
@pytest.mark.parametrize("name", ["tied", "frozen", "augmented", "unused"])
def test_asynchronous_equals_its_simulation(ranks: Any, count: int, name: str, optimizer: str) -> None:
    """The order is random with a seed, so gradients are stale. Some trainers have no samples. Each push is clipped."""
    layouts = [ASYNC, f"{ASYNC},servers=2"][: count - 1]
    results = parities(ranks, count, name, optimizer, layouts)
    assert_equal(layouts, results)
    assert all("simulation" in (parity.scope or "") for parity in results)
    assert all(any("order=seeded" in check for check in parity.checks) for parity in results)


def test_asynchronous_with_micro_batches(ranks: Any) -> None:
    layouts = [f"{ASYNC},accumulate=3", f"{ASYNC},order=seeded,precision=bf16"]
    assert_equal(layouts, parities(ranks, 4, "tied", "sgd", layouts))


def test_asynchronous_trainers_refuse_batch_norm(ranks: Any) -> None:
    """The reason recommends updates=sync."""
    (parity,) = parities(ranks, 3, "norm", "sgd", [ASYNC])
    assert parity.status == "refused"
    assert "use updates=sync" in (parity.reason or "")


def newest_instead_of_pulled(_: str, world: World) -> Patch:
    """A trainer pulls late, so its parameters include updates that it should not have."""
    return mock.patch.object(
        asynchronous, "order_of_trainers", lambda *_: [trainer for trainer in range(3) for _ in range(2)]
    )


def applied_twice(_: str, world: World) -> Patch:
    """The first push of an update is applied twice."""

    def add_gradients(original: Any, link: ServerLink, trainer: int, head: torch.Tensor) -> None:
        original(link, trainer, head)
        if trainer == 1:
            for parameter in link.server_parameters:
                if parameter.grad is not None:
                    parameter.grad *= 2

    return _patch_link("add_gradients", add_gradients)


def scaled_by_all(_: str, world: World) -> Patch:
    """A trainer divides by the global batch instead of the number of its own terms."""
    original = asynchronous.normalise_gradients

    def normalise_gradients(trainable: Any, sum_and_count: torch.Tensor) -> bool:
        is_normalised = original(trainable, sum_and_count)
        for parameter in trainable.parameters:
            if parameter.grad is not None and is_normalised:
                parameter.grad *= float(sum_and_count[1]) / trainable.global_batch
        return is_normalised

    return mock.patch.object(asynchronous, "normalise_gradients", normalise_gradients)


@pytest.mark.parametrize("mutation", [newest_instead_of_pulled, applied_twice, scaled_by_all])
def test_asynchronous_mutation_is_detected(ranks: Any, mutation: Any) -> None:
    parity = ranks(4, check, mutation, "frozen", ",updates=async")[0]
    assert parity.status == "different"
    assert parity.first_divergence


def test_stale_gradients_are_not_equivalent(ranks: Any) -> None:
    """The losses of the simulation are not those of one device."""
    one_device, simulated = ranks(2, losses_of, ["single", f"{ASYNC},simulated=3"])[0]
    assert abs(simulated[1] / one_device[1] - 1) > 1e-3


def losses_of(world: World, layouts: list[str]) -> list[list[float]]:
    """Return the losses of each layout in one process."""
    case = zoo.cached_parity_case(world, "frozen", "sgd")
    one_process = single_process_world(world)
    return [trace(case, parse_layout(text), one_process, case.planned("float64")).losses for text in layouts]


@pytest.mark.parametrize("servers", [1, 2])
def test_asynchronous_training_in_arrival_order_learns_and_ends(ranks: Any, servers: int) -> None:
    """Arrival order has no reference. The loss falls, all updates run, and all ranks end with the same model."""
    for losses, is_equal in ranks(4, train_asynchronously, f"{ASYNC},servers={servers}"):
        assert len(losses) == 40
        assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
        assert is_equal


def train_asynchronously(world: World, text: str) -> tuple[list[float], bool]:
    """Return the mean loss of each of 40 updates, and whether all ranks have the same model."""
    workload = zoo.workload("frozen", epochs=10)
    workload = dataclasses.replace(workload, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01))
    data, _ = open_data(workload, world)
    prepared = prepare(workload, parse_layout(text), world)
    sums_and_counts = torch.stack(list(run_updates(prepared, data, all_updates(40, 4))))
    prepared.gather_for_eval()
    totals = sum_over_ranks(sums_and_counts, world)
    return (totals[:, 0] / totals[:, 1]).tolist(), all_equal(list(prepared.replicated_tensors), world)


def test_two_servers_with_different_trainer_orders_do_not_deadlock(cli: Cli, tmp_path: Path) -> None:
    """A gloo send waits for its receiver. No server waits for a trainer that waits for the other server."""
    args = ("--set", "norm=group", "--layout", f"{ASYNC},servers=2", "--backend", "gloo", "--timeout", "60")
    result = cli.on_ranks(tmp_path, "train", "digits", *args, "--steps", "40", "--save-every", "0", size=4)
    assert result.status == 0, result.err
