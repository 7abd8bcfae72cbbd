"""Memory of an update in addition to the permanent memory: gradients, and copies of parameters in a broadcast."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import everyrank.parallel.zero1 as zero1
import everyrank.strategies.zero1
import zoo
from checkpointing import TrainingSession, assert_equal_tensors
from everyrank.measure.memory import peak_memory
from everyrank.parallel.flat import buckets
from everyrank.parallel.pipeline.deferred import WeightGradQueue
from everyrank.world import World

LAYER = 4 * 256 * 257  # bytes


def wide_model() -> nn.Module:
    """Return ten layers, most of the same size. Their parameters are much larger than their activations."""
    layers = [nn.Linear(256, 256) for _ in range(8)]
    return nn.Sequential(nn.Linear(5, 256), nn.Tanh(), *layers, nn.Linear(256, 2))


def memory_of_an_update(world: World) -> float:
    """Return the peak memory of an update, relative to the size of the parameters. Permanent memory does not count."""
    training = TrainingSession(world, zoo.workload("frozen", "sgd", model=wide_model, blocks=None), "ddp")
    num_bytes = sum(parameter.nbytes for parameter in training.prepared.trainable.parameters)
    training.train(0, 3)  # after these, DDP has rebuilt its buckets, and the optimizer has its state
    with peak_memory(world.device) as memory:
        training.train(3, 5)
    return memory.bytes / num_bytes


def test_gradients_exist_only_in_the_buckets_of_ddp(ranks: Any) -> None:
    """Gradients are views of DDP's buckets. So an update needs memory for activations and one gradient."""
    for relative_memory in ranks(2, memory_of_an_update):
        assert relative_memory < 0.6


def test_inputs_of_deferred_weight_gradients_are_freed() -> None:
    """A zero-bubble pipeline keeps layer inputs for weight gradients. They are freed when these are computed."""
    queue = WeightGradQueue(is_used=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    layer_inputs: list[weakref.ref[Tensor]] = []
    model[1].register_forward_hook(lambda _, __, output: layer_inputs.append(weakref.ref(output)))
    for update in range(3):
        queue.select(0, update)
        with queue.context():
            total = model(torch.ones(2, 4)).sum()
        total.backward()
        queue.compute(0, update)
    assert model[2].weight.grad is not None
    del total
    gc.collect()
    assert [reference() for reference in layer_inputs] == [None] * 3


def broadcast_copies(world: World, held_bytes: int | None) -> tuple[int, int, dict[str, Tensor]]:
    """Run three updates of zero1. Return (peak bytes of copies in broadcasts, broadcasts per update, final model)."""
    training = TrainingSession(world, zoo.workload("frozen", "sgd", model=wide_model, blocks=None), "zero1")
    flatten, write_back = zero1.flatten, zero1.write_back
    copy_bytes: list[int] = [0]  # bytes of all copies, after each change

    def flatten_and_count(tensors: Any) -> Tensor:
        copy_bytes.append(copy_bytes[-1] + sum(tensor.nbytes for tensor in tensors))
        return flatten(tensors)

    def write_back_and_count(flat: Tensor, tensors: Any) -> None:
        copy_bytes.append(copy_bytes[-1] - flat.nbytes)
        write_back(flat, tensors)

    broadcast = zero1.broadcast_from_owners
    if held_bytes is not None:
        broadcast = functools.partial(broadcast, held_bytes=held_bytes)
    with (
        mock.patch.object(zero1, "flatten", flatten_and_count),
        mock.patch.object(zero1, "write_back", write_back_and_count),
        mock.patch.object(everyrank.strategies.zero1, "broadcast_from_owners", broadcast),
    ):
        training.train(0, 3)
    assert copy_bytes[-1] == 0
    return max(copy_bytes), (len(copy_bytes) - 1) // 2 // 3, training.state()[0]


@pytest.mark.parametrize(
    ("held_bytes", "max_bytes", "min_broadcasts"), [(LAYER // 2, LAYER, 8), (int(2.5 * LAYER), int(2.5 * LAYER), 7)]
)
def test_zero1_owners_hold_few_copies_at_a_time(
    ranks: Any, held_bytes: int, max_bytes: int, min_broadcasts: int
) -> None:
    """Owners broadcast copies of a few layers at a time, or of one parameter, however many they own."""
    unlimited, limited = ranks(2, broadcast_copies, None), ranks(2, broadcast_copies, held_bytes)
    for (unlimited_bytes, num_broadcasts, state), (limited_bytes, num_limited_broadcasts, limited_state) in zip(
        unlimited, limited, strict=True
    ):
        assert unlimited_bytes > 8 * LAYER
        assert num_broadcasts == 2, "one of each owner, as long as all of it is small"
        assert limited_bytes <= max_bytes
        assert num_limited_broadcasts >= min_broadcasts
        assert_equal_tensors(state, limited_state)


def test_buckets_have_at_most_the_given_size() -> None:
    """Each tensor is in one bucket of its dtype, in order. A tensor larger than a bucket has its own."""
    sizes = [0, 3, 4, 20, 2, 7, 3]
    tensors = [torch.empty(size, dtype=torch.float32) for size in sizes]
    tensors.insert(2, torch.empty(1, dtype=torch.float64))
    grouped = buckets(tensors, 4 * 8)
    assert [[tensor.numel() for tensor in bucket] for bucket in grouped] == [[0, 3, 4], [20], [2], [7], [3], [1]]
    assert [bucket[0].dtype for bucket in grouped] == [torch.float32] * 5 + [torch.float64]
    assert buckets([], 1) == []
    assert [len(bucket) for bucket in buckets(tensors[:1], 0)] == [1]
