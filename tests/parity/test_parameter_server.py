"""Parameter servers: synchronous ones equal one device; asynchronous ones a replay of the same order in one process."""

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
    """Ragged batches, masks, ties, frozen and unused parameters, buffers, batch norm, clipping; one and two servers."""
    layouts = ["parameter_server", "parameter_server:servers=2"][: count - 1]
    assert_equal(layouts, parities(ranks, count, name, optimizer, layouts))


@pytest.mark.parametrize("name", ["tied", "frozen", "norm"])
def test_synchronous_with_micro_batches(ranks: Any, name: str) -> None:
    """Some smaller than the trainers are many; and blocks that run twice."""
    changes: dict[str, Any] = {
        "tied": {},
        "frozen": {"model": zoo.uncounted_model},
        "norm": {"global_batch": 12},  # micro-batches of one sample have no variance
    }[name]
    layouts = ["parameter_server:accumulate=3", "parameter_server:servers=2,accumulate=3,recompute"]
    if name == "frozen":  # it has no blocks
        layouts = layouts[:1]
    assert_equal(layouts, parities(ranks, 4, name, "sgd", layouts, **changes))


@pytest.mark.parametrize("name", ["tied", "norm"])
def test_low_precision_stays_in_the_band(ranks: Any, name: str) -> None:
    layouts = ["parameter_server:precision=bf16"]
    assert_equal(layouts, parities(ranks, 3, name, "sgd", layouts))


Patch = contextlib.AbstractContextManager[Any]


def _instead(name: str, replaced: Callable[..., Any]) -> Patch:
    """A method of ServerLink becomes `replaced(original, link, ...)`."""
    original = getattr(ServerLink, name)
    return mock.patch.object(ServerLink, name, lambda link, *rest: replaced(original, link, *rest))


def _stepping(step: Callable[..., None]) -> Patch:
    """The server's steps become `step(original, total, named)`."""
    make = parameter_server.make_trainable

    def make_trainable(*arguments: Any) -> Any:
        trainable = make(*arguments)
        original = trainable.optimizer_step
        trainable.optimizer_step = lambda total, **named: step(original, total, **named)
        return trainable

    return mock.patch.object(parameter_server, "make_trainable", make_trainable)


def mean_of_means(_: str, world: World) -> Patch:
    """Each trainer takes the mean over its own part, and the server the mean of these, however many are in each."""

    def push(original: Any, link: ServerLink, share: torch.Tensor) -> None:
        if float(share[1]):
            for parameter in (parameter for part in link.parts for parameter in part):
                if parameter.grad is not None:
                    parameter.grad /= share[1]
        original(link, share)

    def step(original: Any, total: torch.Tensor, **named: Any) -> None:
        original(torch.stack([total[0], torch.tensor(world.size - 1.0, dtype=torch.float64)]), **named)

    stack = contextlib.ExitStack()
    stack.enter_context(_instead("push", push))
    stack.enter_context(_stepping(step))
    return stack


def second_push_late(_: str, world: World) -> Patch:
    """What the second trainer pushes is applied one update late."""
    kept: list[list[Any]] = []

    def add_gradients(original: Any, link: ServerLink, trainer: int, head: torch.Tensor) -> None:
        before = [None if p.grad is None else p.grad.clone() for p in link.server_parameters]
        original(link, trainer, head)
        if trainer == 2:
            kept.append(
                [p.grad if b is None else p.grad - b for p, b in zip(link.server_parameters, before, strict=True)]
            )
            for index, (parameter, now) in enumerate(zip(link.server_parameters, before, strict=True)):
                late = kept[-2][index] if len(kept) > 1 else torch.zeros_like(parameter)
                parameter.grad = late.clone() if now is None else now + late

    return _instead("add_gradients", add_gradients)


def first_push_alone(_: str, world: World) -> Patch:
    """The server makes its update of the first push, and throws the others away: too few synchronous updates."""

    def add_gradients(original: Any, link: ServerLink, trainer: int, head: torch.Tensor) -> None:
        before = [None if p.grad is None else p.grad.clone() for p in link.server_parameters]
        original(link, trainer, head)
        if trainer > 1:
            for parameter, now in zip(link.server_parameters, before, strict=True):
                parameter.grad = now

    return _instead("add_gradients", add_gradients)


def never_pulled(_: str, world: World) -> Patch:
    """Trainers go on with the parameters that they began with."""

    def pull(original: Any, link: ServerLink) -> None:
        own = [parameter.detach().clone() for parameter in link.mesh_parameters()]
        original(link)
        for parameter, kept in zip(link.mesh_parameters(), own, strict=True):
            parameter.data.copy_(kept)

    stack = contextlib.ExitStack()
    everything = lambda link: [p for part in link.parts for p in part]  # noqa: E731
    stack.enter_context(mock.patch.object(ServerLink, "mesh_parameters", everything, create=True))
    stack.enter_context(_instead("pull", pull))
    return stack


def averaged_once_too_often(_: str, world: World) -> Patch:
    """The sum over all terms is divided by the number of trainers, too."""
    return _stepping(lambda original, total, **named: original(total * torch.tensor([1.0, world.size - 1.0]), **named))


def clipped_by_own_norm(_: str, world: World) -> Patch:
    """Each server clips by the norm of its own part."""
    return _stepping(lambda original, total, **_: original(total))


# mutation, workload, ranks, keys, words of the cause
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
def test_mutation_is_red(ranks: Any, mutation: Any, name: str, count: int, keys: str, cause: str) -> None:
    """The mistake is found, and its first divergence is named."""
    parity = ranks(count, check, mutation, name, keys)[0]
    assert parity.status == "different"
    assert parity.first_divergence
    assert cause in (parity.cause or ""), parity


def check(world: World, mutation: Any, name: str, keys: str) -> Parity:
    changes: dict[str, Any] = {"clip_norm": 0.05 if mutation is clipped_by_own_norm else None}
    if mutation is batch_norm_alone:
        changes["global_batch"] = 8
    subject = zoo.case(world, name, "sgd", **changes)
    layout = parse_layout(f"parameter_server:precision=float64{keys}")
    key = f"mutation/{mutation.__name__}"
    ensure_references(subject, layout, world, f"{key}/single")  # before anything is patched
    with mutation("parameter_server", world):
        return check_layout(subject, layout, world, key)[0]


# --- asynchronous

ASYNC = "parameter_server:updates=async"


@pytest.mark.parametrize(("count", "optimizer"), [(2, "adamw"), (3, "adamw"), (4, "sgd")])
@pytest.mark.parametrize("name", ["tied", "frozen", "augmented", "unused"])
def test_asynchronous_equals_its_simulation(ranks: Any, count: int, name: str, optimizer: str) -> None:
    """Stale gradients in a drawn order, trainers without samples, clipping of each push; one and two servers."""
    layouts = [ASYNC, f"{ASYNC},servers=2"][: count - 1]
    found = parities(ranks, count, name, optimizer, layouts)
    assert_equal(layouts, found)
    assert all("simulation" in (parity.scope or "") for parity in found)
    assert all(any("order=seeded" in check for check in parity.checks) for parity in found)


def test_asynchronous_with_micro_batches(ranks: Any) -> None:
    layouts = [f"{ASYNC},accumulate=3", f"{ASYNC},order=seeded,precision=bf16"]
    assert_equal(layouts, parities(ranks, 4, "tied", "sgd", layouts))


def test_batch_norm_is_refused_of_asynchronous_trainers(ranks: Any) -> None:
    """By the layout as by its simulation."""
    (parity,) = parities(ranks, 3, "norm", "sgd", [ASYNC])
    assert parity.status == "refused"
    assert "use updates=sync" in (parity.reason or "")


def newest_instead_of_pulled(_: str, world: World) -> Patch:
    """A trainer pulls late: what it computes with has had updates that it should not know of."""
    return mock.patch.object(asynchronous, "order_of_trainers", lambda *_: [one for one in range(3) for _ in range(2)])


def applied_twice(_: str, world: World) -> Patch:
    """The first push of an update is applied twice."""

    def add_gradients(original: Any, link: ServerLink, trainer: int, head: torch.Tensor) -> None:
        original(link, trainer, head)
        if trainer == 1:
            for parameter in link.server_parameters:
                if parameter.grad is not None:
                    parameter.grad *= 2

    return _instead("add_gradients", add_gradients)


def scaled_by_all(_: str, world: World) -> Patch:
    """A trainer divides by the global batch, not by the terms of its own part."""
    original = asynchronous.normalise_gradients

    def normalise_gradients(trainable: Any, share: torch.Tensor) -> bool:
        done = original(trainable, share)
        for parameter in trainable.parameters:
            if parameter.grad is not None and done:
                parameter.grad *= float(share[1]) / trainable.global_batch
        return done

    return mock.patch.object(asynchronous, "normalise_gradients", normalise_gradients)


@pytest.mark.parametrize("mutation", [newest_instead_of_pulled, applied_twice, scaled_by_all])
def test_asynchronous_mutation_is_red(ranks: Any, mutation: Any) -> None:
    parity = ranks(4, check, mutation, "frozen", ",updates=async")[0]
    assert parity.status == "different"
    assert parity.first_divergence


def test_stale_gradients_are_another_training(ranks: Any) -> None:
    """Said of it, and so: the losses of the simulation are not those of one device."""
    one_device, simulated = ranks(2, losses_of, ["single", f"{ASYNC},simulated=3"])[0]
    assert abs(simulated[1] / one_device[1] - 1) > 1e-3


def losses_of(world: World, layouts: list[str]) -> list[list[float]]:
    subject = zoo.case(world, "frozen", "sgd")
    alone = single_process_world(world)
    return [trace(subject, parse_layout(text), alone, subject.planned("float64")).losses for text in layouts]


@pytest.mark.parametrize("servers", [1, 2])
def test_in_order_of_arrival_it_learns_and_ends(ranks: Any, servers: int) -> None:
    """What cannot be compared: no message is lost, none too many is waited for, all ranks settle on one model."""
    for losses, is_equal in ranks(4, trained, f"{ASYNC},servers={servers}"):
        assert len(losses) == 40
        assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
        assert is_equal


def trained(world: World, text: str) -> tuple[list[float], bool]:
    workload = zoo.workload("frozen", epochs=10)
    workload = dataclasses.replace(workload, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01))
    data, _ = open_data(workload, world)
    prepared = prepare(workload, parse_layout(text), world)
    shares = torch.stack(list(run_updates(prepared, data, all_updates(40, 4))))
    prepared.gather_for_eval()
    totals = sum_over_ranks(shares, world)
    return (totals[:, 0] / totals[:, 1]).tolist(), all_equal(list(prepared.replicated_tensors), world)


def test_two_servers_take_trainers_in_different_orders(cli: Cli, tmp_path: Path) -> None:
    """Over gloo, whose sends wait for the receiver: no server waits for a trainer that waits for the other server."""
    words = ("--set", "norm=group", "--layout", f"{ASYNC},servers=2", "--backend", "gloo", "--timeout", "60")
    done = cli.on_ranks(tmp_path, "train", "digits", *words, "--steps", "40", "--save-every", "0", size=4)
    assert done.status == 0, done.err
