"""Each mistake that people make must turn parity red, under the optimizer that shows it.

A mutation patches the real code inside the ranks for one check. Only the distributed run meets it: `single` runs
unpatched, because a patch acts where more than one rank reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zoo
from everyrank import parse_layout
from everyrank.data import Slice
from everyrank.loop import open_data
from everyrank.parallel.mesh import Mesh
from everyrank.parity import check_layout, parity_case
from everyrank.parity.reference import ensure_references
from everyrank.record import Parity
from everyrank.world import World

_COUNTER = iter(range(10**9))
Patch = contextlib.AbstractContextManager[Any]


def _strategy(name: str) -> Any:
    return importlib.import_module(f"everyrank.strategies.{name}")


def _without_reduction(state: Any, bucket: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


_without_reduction.__annotations__ = {"bucket": dist.GradBucket}  # torch looks at the annotation itself


def no_all_reduce(strategy: str, world: World) -> Patch:
    """Gradients stay on the rank that computed them."""
    module = _strategy(strategy)
    if strategy == "fsdp":
        original = module.apply_fsdp

        def apply_fsdp(model: Any, *rest: Any) -> None:
            original(model, *rest)
            for part in model.modules():
                if hasattr(part, "set_custom_reduce_scatter"):
                    part.set_custom_reduce_scatter(_OwnPart(world))

        return mock.patch.object(module, "apply_fsdp", apply_fsdp)
    original = module.apply_ddp

    def apply_ddp(*arguments: Any) -> Any:
        ddp = original(*arguments)
        ddp.register_comm_hook(None, _without_reduction)
        return ddp

    return mock.patch.object(module, "apply_ddp", apply_ddp)


class _OwnPart:
    """In place of a reduce-scatter: keep this rank's part of this rank's own gradients."""

    def __init__(self, world: World) -> None:
        self.world = world

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        output_tensor.copy_(input_tensor.chunk(self.world.size)[self.world.rank])
        return None


def _stepping(strategy: str, step: Callable[..., None]) -> Patch:
    """The optimizer steps of this strategy become `step(original, trainable, total, ...)`; those of `single` do not."""
    module = _strategy(strategy)
    make = module.make_trainable

    def make_trainable(*arguments: Any, **options: Any) -> Any:
        trainable = make(*arguments, **options)
        original = trainable.optimizer_step
        trainable.optimizer_step = lambda *rest, **named: step(original, trainable, *rest, **named)
        return trainable

    return mock.patch.object(module, "make_trainable", make_trainable)


def sum_for_mean(strategy: str, world: World) -> Patch:
    """The factor that undoes the wrapper's average is applied twice: gradients are W times too large."""

    def step(original: Any, trainable: Any, total: Any, *rest: Any, **named: Any) -> None:
        original(total / torch.tensor([1.0, world.size], dtype=total.dtype), *rest, **named)

    return _stepping(strategy, step)


def local_count(strategy: str, world: World) -> Patch:
    """Each rank divides by the number of its own terms, as if all ranks had as many."""
    module = _strategy(strategy if strategy == "pipeline" else "step")
    own: list[Any] = []

    def step(original: Any, trainable: Any, total: Any, *rest: Any, **named: Any) -> None:
        original(sum(own) * world.size if float(sum(own)[1]) else total, *rest, **named)
        own.clear()

    def compute_loss(*arguments: Any) -> Any:
        loss, share = loss_original(*arguments)
        own.append(share)
        return loss, share

    loss_original = module.compute_loss
    stack = contextlib.ExitStack()
    stack.enter_context(_stepping(strategy, step))
    stack.enter_context(mock.patch.object(module, "compute_loss", compute_loss))
    return stack


def same_slice(strategy: str, world: World) -> Patch:
    """Every rank reads the first rank's part."""
    first = property(lambda mesh: Slice(0, mesh.size("replicate", "shard")))
    return mock.patch.object(Mesh, "data_slice", first)


def weights_averaged(strategy: str, world: World) -> Patch:
    """Each rank steps on its own gradients, then the weights are averaged."""
    stack = contextlib.ExitStack()
    stack.enter_context(no_all_reduce(strategy, world))

    def step(original: Any, trainable: Any, total: Any, *rest: Any, **named: Any) -> None:
        if strategy != "fsdp":
            total = total / world.size  # the carrier was not reduced: add it up by hand
            dist.all_reduce(total)
        original(total, *rest, **named)
        if strategy == "ddp":
            for parameter in trainable.parameters:
                dist.all_reduce(parameter.data)
                parameter.data /= world.size

    stack.enter_context(_stepping(strategy, step))
    return stack


def last_micro_batch_dropped(strategy: str, world: World) -> Patch:
    """The loop over micro-batches ends one too early, and the count with it."""

    def change(prepared: Any) -> Any:
        return dataclasses.replace(prepared, step=lambda batches: prepared.step(batches[:-1] or batches))

    return _prepared(strategy, change)


def epoch_not_set(strategy: str, world: World) -> Patch:
    """set_epoch is forgotten: every epoch has the order of the first."""
    import everyrank.loop.updates

    original = everyrank.loop.updates.batches_for_updates

    def batches(workload: Any, dataset: Any, updates: Any, reads: Slice, *rest: Any) -> Any:
        if reads.count > 1:
            updates = [dataclasses.replace(update, epoch=0) for update in updates]
        return original(workload, dataset, updates, reads, *rest)

    return mock.patch.object(everyrank.loop.updates, "batches_for_updates", batches)


def batch_norm_alone(strategy: str, world: World) -> Patch:
    """Each rank normalises by the statistics of its own samples."""
    import everyrank.parallel.parallelize

    return mock.patch.object(everyrank.parallel.parallelize, "apply_batch_norm")


def padding_sample_counts(strategy: str, world: World) -> Patch:
    """A padding sample takes part in the batch norm statistics."""
    import everyrank.parallel.batch_norm as batch_norm

    class Forgetful(batch_norm.MicroBatchState):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, False if name == "is_padding" else value)

    import everyrank.parallel.parallelize

    return mock.patch.object(everyrank.parallel.parallelize, "MicroBatchState", Forgetful)


def clipped_by_local_norm(strategy: str, world: World) -> Patch:
    """Each rank clips by the norm of its own shards."""
    return _stepping(strategy, lambda original, _, total, num_averaged, sum_grad_squares: original(total, num_averaged))


def seeded_by_rank(strategy: str, world: World) -> Patch:
    """Every rank builds its own weights, and nobody sends rank 0's round."""
    import everyrank.parallel.init_model
    import everyrank.parallel.parallelize

    original = everyrank.parallel.init_model.seed_everything
    stack = contextlib.ExitStack()
    offset = world.rank if strategy == "fsdp" else 1
    stack.enter_context(
        mock.patch.object(
            everyrank.parallel.init_model,
            "seed_everything",
            lambda seed: original(seed + offset * _is_distributed()),
        )
    )
    if strategy == "fsdp":
        stack.enter_context(mock.patch.object(everyrank.parallel.parallelize, "broadcast_from_rank_0"))
    return stack


def stale_owners(strategy: str, world: World) -> Patch:
    """Owners update their parameters and forget to send them."""
    return mock.patch.object(_strategy(strategy), "broadcast_from_owners")


def no_sync_too_late(strategy: str, world: World) -> Patch:
    """no_sync around all micro-batches: the last one sends nothing either."""
    from torch.nn.parallel import DistributedDataParallel

    original = DistributedDataParallel.forward

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        with self.no_sync():
            return original(self, *arguments, **named)

    return mock.patch.object(DistributedDataParallel, "forward", forward)


def _is_distributed() -> bool:
    """Whether the code that runs belongs to the distributed strategy, told from the call stack."""
    import sys

    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(("ddp.py", "zero1.py", "fsdp.py")):
            return True
        frame = frame.f_back
    return False


def _prepared(strategy: str, change: Callable[[Any], Any]) -> Patch:
    module = _strategy(strategy)
    original = module.prepare
    return mock.patch.object(module, "prepare", lambda *arguments: change(original(*arguments)))


ALL = ("ddp", "zero1", "fsdp")
# mutation, strategies, workload, optimizer under which it shows, ranks, keys of the layout, words of the cause
CASES: list[tuple[Callable[[str, World], Patch], tuple[str, ...], str, str, int, str, str]] = [
    (no_all_reduce, ALL, "frozen", "sgd", 2, "", ""),
    (sum_for_mean, ALL, "frozen", "sgd", 2, "", "summed, not averaged"),
    (local_count, ALL, "tied", "sgd", 2, "", ""),
    (same_slice, ALL, "frozen", "sgd", 3, "", "samples"),
    (weights_averaged, ALL, "frozen", "adamw", 2, "", ""),
    (last_micro_batch_dropped, ALL, "frozen", "sgd", 2, ":accumulate=3", "counted"),
    (epoch_not_set, ALL, "frozen", "sgd", 2, "", "set_epoch"),
    (batch_norm_alone, ALL, "norm", "sgd", 2, "", "batch norm"),
    (padding_sample_counts, ALL, "norm", "sgd", 3, "", ""),
    (clipped_by_local_norm, ("fsdp",), "tied", "sgd", 2, "", ""),
    (seeded_by_rank, ALL, "frozen", "sgd", 2, "", "same weights"),
    (stale_owners, ("zero1",), "frozen", "sgd", 2, "", "different weights"),
    (no_sync_too_late, ("ddp", "zero1"), "frozen", "sgd", 2, "", ""),
]


def check(world: World, mutation: Any, strategy: str, name: str, optimizer: str, keys: str, key: str) -> Parity:
    changes: dict[str, Any] = {"clip_norm": 0.05} if mutation is clipped_by_local_norm else {"clip_norm": None}
    if mutation is batch_norm_alone:
        changes["global_batch"] = 8  # a single sample has no variance, which torch itself would say
    if "accumulate" in keys:
        changes["model"] = zoo.uncounted_model
    subject = zoo.case(world, name, optimizer, **changes)
    layout = parse_layout(f"{strategy}:precision=float64{keys.replace(':', ',')}")
    ensure_references(subject, layout, world, f"{key}/single")  # before anything is patched
    with mutation(strategy, world):
        return check_layout(subject, layout, world, key)[0]


def _cases() -> list[Any]:
    return [
        pytest.param(mutation, strategy, *rest, id=f"{mutation.__name__}-{strategy}")
        for mutation, strategies, *rest in CASES
        for strategy in strategies
    ]


@pytest.mark.parametrize(("mutation", "strategy", "name", "optimizer", "count", "keys", "cause"), _cases())
def test_mutation_is_red(
    ranks: Any, mutation: Any, strategy: str, name: str, optimizer: str, count: int, keys: str, cause: str
) -> None:
    """The mistake is found, and its first divergence is named."""
    parity = ranks(count, check, mutation, strategy, name, optimizer, keys, f"mutation/{next(_COUNTER)}")[0]
    assert parity.status == "different"
    assert parity.first_divergence
    assert cause in (parity.cause or ""), parity


def test_averaged_weights_hide_under_sgd(ranks: Any) -> None:
    """Why that mutation needs AdamW: under SGD with momentum averaging weights *is* averaging gradients."""
    key = f"mutation/{next(_COUNTER)}"
    parity = ranks(2, check, weights_averaged, "ddp", "frozen", "sgd", "", key)[0]
    assert parity.status == "equal", parity


@pytest.mark.parametrize("count", [2, 3])
def test_local_mean_is_named(ranks: Any, count: int) -> None:
    """A loss that returns (mean, 1) on ragged masks is wrong in every layout; the counts alone convict it."""
    parity = ranks(count, check_local_mean, f"mutation/{next(_COUNTER)}")[0]
    assert parity.status == "different"
    assert "local mean" in parity.cause
    assert "count of loss terms" in parity.first_divergence


def check_local_mean(world: World, key: str) -> Parity:
    def loss(output: Any, target: Any) -> Any:
        total, count = zoo.masked_loss(output, target)
        return total / count.clamp(min=1), 1

    workload = zoo.workload("tied", loss=loss)
    subject = parity_case(workload, *open_data(workload, world), steps=20)
    return check_layout(subject, parse_layout("ddp"), world, key)[0]


def test_random_forward_is_named(ranks: Any) -> None:
    """Noise in forward cannot be switched off from outside; the noise floor itself gives it away."""
    parity = ranks(2, check_random_forward, f"mutation/{next(_COUNTER)}")[0]
    assert parity.status == "different"
    assert "random numbers" in parity.cause


class Noisy(zoo.FrozenModel):
    """Noise that a function draws."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values + torch.randn_like(values))


def check_random_forward(world: World, key: str) -> Parity:
    workload = zoo.workload("frozen", model=Noisy)
    subject = parity_case(workload, *open_data(workload, world), steps=20)
    return check_layout(subject, parse_layout("ddp"), world, key)[0]
