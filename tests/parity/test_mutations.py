"""Parity detects each common mistake, under the optimizer that reveals it.

A mutation patches the real code inside the ranks for one check. It affects only the distributed run. `single` runs
unpatched, because a patch acts only with more than one rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
from collections.abc import Callable
from pathlib import Path
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


def _strategy_module(name: str) -> Any:
    """Return the module of a strategy."""
    return importlib.import_module(f"everyrank.strategies.{name}")


def _without_reduction(state: Any, bucket: Any) -> Any:
    """Return the local gradients of the bucket. This is a communication hook of DDP."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


_without_reduction.__annotations__ = {"bucket": dist.GradBucket}  # torch checks this annotation


def no_all_reduce(strategy: str, world: World) -> Patch:
    """Gradients stay on the rank that computed them."""
    module = _strategy_module(strategy)
    if strategy == "fsdp":
        original = module.apply_fsdp

        def apply_fsdp(model: Any, *rest: Any) -> None:
            original(model, *rest)
            for submodule in model.modules():
                if hasattr(submodule, "set_custom_reduce_scatter"):
                    submodule.set_custom_reduce_scatter(_LocalShard(world))

        return mock.patch.object(module, "apply_fsdp", apply_fsdp)
    assert hasattr(module, "apply_ddp"), f"write in no_all_reduce how to skip the reduction of {strategy}"
    original = module.apply_ddp

    def apply_ddp(*args: Any) -> Any:
        ddp = original(*args)
        ddp.register_comm_hook(None, _without_reduction)
        return ddp

    return mock.patch.object(module, "apply_ddp", apply_ddp)


class _LocalShard:
    """A replacement of reduce-scatter that keeps this rank's shard of this rank's gradients."""

    def __init__(self, world: World) -> None:
        self.world = world

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        output_tensor.copy_(input_tensor.chunk(self.world.size)[self.world.rank])
        return None


def _patch_optimizer_step(strategy: str, step: Callable[..., None]) -> Patch:
    """Replace optimizer steps of this strategy by `step(original, trainable, total, ...)`. `single` is unchanged."""
    module = _strategy_module(strategy)
    original_make = module.make_trainable

    def make_trainable(*args: Any, **options: Any) -> Any:
        trainable = original_make(*args, **options)
        original = trainable.optimizer_step
        trainable.optimizer_step = lambda *step_args, **kwargs: step(original, trainable, *step_args, **kwargs)
        return trainable

    return mock.patch.object(module, "make_trainable", make_trainable)


def sum_for_mean(strategy: str, world: World) -> Patch:
    """The factor that reverts the average of the wrapper is applied twice. Gradients are W times too large."""

    def step(original: Any, trainable: Any, total: Any, *args: Any, **kwargs: Any) -> None:
        original(total / torch.tensor([1.0, world.size], dtype=total.dtype), *args, **kwargs)

    return _patch_optimizer_step(strategy, step)


def local_count(strategy: str, world: World) -> Patch:
    """Each rank divides by its own number of terms, as if all ranks had the same number."""
    module = _strategy_module(strategy if strategy == "pipeline" else "step")
    local_sums: list[Any] = []

    def step(original: Any, trainable: Any, total: Any, *args: Any, **kwargs: Any) -> None:
        original(sum(local_sums) * world.size if float(sum(local_sums)[1]) else total, *args, **kwargs)
        local_sums.clear()

    def compute_loss(*loss_args: Any) -> Any:
        loss, sum_and_count = original_loss(*loss_args)
        local_sums.append(sum_and_count)
        return loss, sum_and_count

    original_loss = module.compute_loss
    stack = contextlib.ExitStack()
    stack.enter_context(_patch_optimizer_step(strategy, step))
    stack.enter_context(mock.patch.object(module, "compute_loss", compute_loss))
    return stack


def same_slice(strategy: str, world: World) -> Patch:
    """Every rank reads the slice of the first rank."""
    first_slice = property(lambda mesh: Slice(0, mesh.size("replicate", "shard")))
    return mock.patch.object(Mesh, "data_slice", first_slice)


def weights_averaged(strategy: str, world: World) -> Patch:
    """Each rank steps with its own gradients, then the weights are averaged."""
    stack = contextlib.ExitStack()
    stack.enter_context(no_all_reduce(strategy, world))

    def step(original: Any, trainable: Any, total: Any, *args: Any, **kwargs: Any) -> None:
        if strategy != "fsdp":
            # the sum and count are not reduced with the gradients, so they are reduced here
            total = total / world.size
            dist.all_reduce(total)
        original(total, *args, **kwargs)
        if strategy == "ddp":
            for parameter in trainable.parameters:
                dist.all_reduce(parameter.data)
                parameter.data /= world.size

    stack.enter_context(_patch_optimizer_step(strategy, step))
    return stack


def last_micro_batch_dropped(strategy: str, world: World) -> Patch:
    """The loop over micro-batches ends one micro-batch too early, and does not count the last one."""

    def change(prepared: Any) -> Any:
        return dataclasses.replace(prepared, step=lambda batches: prepared.step(batches[:-1] or batches))

    return _patch_prepare(strategy, change)


def epoch_not_set(strategy: str, world: World) -> Patch:
    """set_epoch is missing, so every epoch has the order of the first one."""
    import everyrank.loop.updates

    original = everyrank.loop.updates.batches_for_updates

    def batches(workload: Any, dataset: Any, updates: Any, data_slice: Slice, *rest: Any) -> Any:
        if data_slice.count > 1:
            updates = [dataclasses.replace(update, epoch=0) for update in updates]
        return original(workload, dataset, updates, data_slice, *rest)

    return mock.patch.object(everyrank.loop.updates, "batches_for_updates", batches)


def batch_norm_alone(strategy: str, world: World) -> Patch:
    """Each rank normalizes by the statistics of its own samples."""
    import everyrank.parallel.parallelize

    return mock.patch.object(everyrank.parallel.parallelize, "apply_batch_norm")


def padding_sample_counts(strategy: str, world: World) -> Patch:
    """A dummy sample counts in the batch norm statistics."""
    import everyrank.parallel.batch_norm as batch_norm

    class StateWithoutPadding(batch_norm.MicroBatchState):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, False if name == "is_padding" else value)

    import everyrank.parallel.parallelize

    return mock.patch.object(everyrank.parallel.parallelize, "MicroBatchState", StateWithoutPadding)


def clipped_by_local_norm(strategy: str, world: World) -> Patch:
    """Each rank clips by the norm of its own shards."""
    return _patch_optimizer_step(
        strategy, lambda original, _, total, num_averaged, sum_grad_squares: original(total, num_averaged)
    )


def seeded_by_rank(strategy: str, world: World) -> Patch:
    """Every rank initializes its own weights, and rank 0 does not broadcast its weights."""
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
    """Owners update their parameters and do not broadcast them."""
    return mock.patch.object(_strategy_module(strategy), "broadcast_from_owners")


def no_sync_too_late(strategy: str, world: World) -> Patch:
    """no_sync covers all micro-batches, so the last one does not all-reduce either."""
    from torch.nn.parallel import DistributedDataParallel

    original = DistributedDataParallel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.no_sync():
            return original(self, *args, **kwargs)

    return mock.patch.object(DistributedDataParallel, "forward", forward)


def _is_distributed() -> bool:
    """Return whether the call stack has code of a distributed strategy."""
    import sys

    frame = sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parent.name == "strategies" and path.stem not in ("__init__", "single", "step"):
            return True
        frame = frame.f_back
    return False


def _patch_prepare(strategy: str, change: Callable[[Any], Any]) -> Patch:
    """Replace what `prepare` of this strategy returns by `change(prepared)`."""
    module = _strategy_module(strategy)
    original = module.prepare
    return mock.patch.object(module, "prepare", lambda *args: change(original(*args)))


ALL = ("ddp", "zero1", "fsdp")
_NOT_THE_SUM = "do not step with the same gradients|are not the sum over all samples"  # with or without replicas
# mutation, strategies, workload, optimizer that reveals it, ranks, keys of the layout, pattern of the cause
CASES: list[tuple[Callable[[str, World], Patch], tuple[str, ...], str, str, int, str, str]] = [
    (no_all_reduce, ALL, "frozen", "sgd", 2, "", _NOT_THE_SUM),
    (sum_for_mean, ALL, "frozen", "sgd", 2, "", "summed, not averaged"),
    (local_count, ALL, "tied", "sgd", 2, "", _NOT_THE_SUM),
    (same_slice, ALL, "frozen", "sgd", 3, "", "samples"),
    (weights_averaged, ("ddp",), "frozen", "adamw", 2, "", "the gradients equal .* but the updates do not"),
    (weights_averaged, ("zero1", "fsdp"), "frozen", "adamw", 2, "", _NOT_THE_SUM),
    (last_micro_batch_dropped, ALL, "frozen", "sgd", 2, ":accumulate=3", "counted"),
    (epoch_not_set, ALL, "frozen", "sgd", 2, "", "set_epoch"),
    (batch_norm_alone, ALL, "norm", "sgd", 2, "", "batch norm"),
    (padding_sample_counts, ALL, "norm", "sgd", 3, "", "batch norm"),
    (clipped_by_local_norm, ("fsdp",), "tied", "sgd", 2, "", "the optimizer computes a norm"),
    (seeded_by_rank, ALL, "frozen", "sgd", 2, "", "same weights"),
    (stale_owners, ("zero1",), "frozen", "sgd", 2, "", "some do not receive the updated weights"),
    (no_sync_too_late, ("ddp", "zero1"), "frozen", "sgd", 2, "", _NOT_THE_SUM),
]


def check(world: World, mutation: Any, strategy: str, name: str, optimizer: str, keys: str, key: str) -> Parity:
    """Return the parity of the strategy under this mutation."""
    changes: dict[str, Any] = {"clip_norm": 0.05} if mutation is clipped_by_local_norm else {"clip_norm": None}
    if mutation is batch_norm_alone:
        changes["global_batch"] = 8  # a single sample has no variance, and torch would raise an error
    if "accumulate" in keys:
        changes["model"] = zoo.model_without_counter
    case = zoo.cached_parity_case(world, name, optimizer, **changes)
    layout = parse_layout(f"{strategy}:precision=float64{keys.replace(':', ',')}")
    ensure_references(case, layout, world, f"{key}/single")  # it runs unpatched
    with mutation(strategy, world):
        return check_layout(case, layout, world, key)[0]


def _cases() -> list[Any]:
    """Return a pytest parameter for each mutation and strategy."""
    return [
        pytest.param(mutation, strategy, *columns, id=f"{mutation.__name__}-{strategy}")
        for mutation, strategies, *columns in CASES
        for strategy in strategies
    ]


@pytest.mark.parametrize(("mutation", "strategy", "name", "optimizer", "count", "keys", "cause"), _cases())
def test_mutation_is_detected(
    ranks: Any, mutation: Any, strategy: str, name: str, optimizer: str, count: int, keys: str, cause: str
) -> None:
    """The result is different, with the first divergence and the cause."""
    parity = ranks(count, check, mutation, strategy, name, optimizer, keys, f"mutation/{next(_COUNTER)}")[0]
    assert parity.status == "different"
    assert parity.first_divergence
    assert re.search(cause, parity.cause or ""), parity


def test_averaged_weights_are_equal_under_sgd(ranks: Any) -> None:
    """Under SGD with momentum, averaging weights is equivalent to averaging gradients. So that mutation needs AdamW."""
    key = f"mutation/{next(_COUNTER)}"
    parity = ranks(2, check, weights_averaged, "ddp", "frozen", "sgd", "", key)[0]
    assert parity.status == "equal", parity


@pytest.mark.parametrize("count", [2, 3])
def test_loss_that_returns_a_local_mean_is_named(ranks: Any, count: int) -> None:
    """A loss that returns (mean, 1) with uneven masks is wrong in every layout. The counts reveal it."""
    parity = ranks(count, check_local_mean, f"mutation/{next(_COUNTER)}")[0]
    assert parity.status == "different"
    assert "local mean" in parity.cause
    assert "count of loss terms" in parity.first_divergence


def check_local_mean(world: World, key: str) -> Parity:
    """Return the parity of ddp with a loss that returns (mean, 1)."""

    def loss(output: Any, target: Any) -> Any:
        total, count = zoo.masked_loss(output, target)
        return total / count.clamp(min=1), 1

    workload = zoo.workload("tied", loss=loss)
    case = parity_case(workload, *open_data(workload, world), steps=20)
    return check_layout(case, parse_layout("ddp"), world, key)[0]


def test_random_numbers_in_forward_are_named(ranks: Any) -> None:
    """Noise in forward cannot be switched off from outside. Perturbed runs of `single` reveal it."""
    parity = ranks(2, check_random_forward, f"mutation/{next(_COUNTER)}")[0]
    assert parity.status == "different"
    assert "random numbers" in parity.cause


class NoisyModel(zoo.FrozenModel):
    """A model that adds random noise to its inputs."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values + torch.randn_like(values))


def check_random_forward(world: World, key: str) -> Parity:
    """Return the parity of ddp with random noise in forward."""
    workload = zoo.workload("frozen", model=NoisyModel)
    case = parity_case(workload, *open_data(workload, world), steps=20)
    return check_layout(case, parse_layout("ddp"), world, key)[0]
