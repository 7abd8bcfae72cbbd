"""What an update takes beside what is kept: copies of gradients, and of parameters on their way."""

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
from checkpointing import Going, same
from everyrank.measure.memory import peak_memory
from everyrank.parallel.flat import buckets
from everyrank.parallel.pipeline.deferred import WeightGradQueue
from everyrank.world import World

LAYER = 4 * 256 * 257  # bytes


def wide() -> nn.Module:
    """Ten layers, nearly all of them alike: parameters count, activations do not."""
    layers = [nn.Linear(256, 256) for _ in range(8)]
    return nn.Sequential(nn.Linear(5, 256), nn.Tanh(), *layers, nn.Linear(256, 2))


def taken_by_an_update(world: World) -> float:
    """Most bytes alive in an update beside those that were there before it, over those of the parameters."""
    going = Going(world, zoo.workload("frozen", "sgd", model=wide, blocks=None), "ddp")
    num_bytes = sum(parameter.nbytes for parameter in going.prepared.trainable.parameters)
    going.updates(0, 3)  # by then buckets are made again, and the optimizer has its state
    with peak_memory(world.device) as found:
        going.updates(3, 5)
    return found.bytes / num_bytes


def test_gradients_are_there_once(ranks: Any) -> None:
    """In DDP's buckets, and not beside them as well: what an update takes are activations and one gradient."""
    for taken in ranks(2, taken_by_an_update):
        assert taken < 0.6


def test_deferred_weight_gradients_are_freed() -> None:
    """The inputs that a zero-bubble pipeline keeps for its weight gradients are gone when these are computed."""
    queue = WeightGradQueue(is_used=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    kept: list[weakref.ref[Tensor]] = []
    model[1].register_forward_hook(lambda _, __, output: kept.append(weakref.ref(output)))
    for update in range(3):
        queue.select(0, update)
        with queue.context():
            total = model(torch.ones(2, 4)).sum()
        total.backward()
        queue.compute(0, update)
    assert model[2].weight.grad is not None
    del total
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3


def held_at_most(world: World, held_bytes: int | None) -> tuple[int, int, dict[str, Tensor]]:
    """(most bytes of copies that are on their way at a time, broadcasts of an update, the model after three)."""
    going = Going(world, zoo.workload("frozen", "sgd", model=wide, blocks=None), "zero1")
    flatten, write_back = zero1.flatten, zero1.write_back
    held: list[int] = [0]

    def counted(tensors: Any) -> Tensor:
        held.append(held[-1] + sum(tensor.nbytes for tensor in tensors))
        return flatten(tensors)

    def let_go(flat: Tensor, tensors: Any) -> None:
        held.append(held[-1] - flat.nbytes)
        write_back(flat, tensors)

    send = zero1.broadcast_from_owners
    if held_bytes is not None:
        send = functools.partial(send, held_bytes=held_bytes)
    with (
        mock.patch.object(zero1, "flatten", counted),
        mock.patch.object(zero1, "write_back", let_go),
        mock.patch.object(everyrank.strategies.zero1, "broadcast_from_owners", send),
    ):
        going.updates(0, 3)
    assert held[-1] == 0
    return max(held), (len(held) - 1) // 2 // 3, going.state()[0]


@pytest.mark.parametrize(("limit", "most", "count"), [(LAYER // 2, LAYER, 8), (int(2.5 * LAYER), int(2.5 * LAYER), 7)])
def test_what_owners_send_is_held_in_pieces(ranks: Any, limit: int, most: int, count: int) -> None:
    """Owners of zero1 send copies: of a few layers at a time, or of one parameter, however many they own."""
    whole, parts = ranks(2, held_at_most, None), ranks(2, held_at_most, limit)
    for (all_of_it, num_broadcasts, state), (held, num_parts, same_state) in zip(whole, parts, strict=True):
        assert all_of_it > 8 * LAYER
        assert num_broadcasts == 2, "one of each owner, as long as all of it is small"
        assert held <= most
        assert num_parts >= count
        same(state, same_state)


def test_buckets_are_no_larger_than_asked() -> None:
    """Each tensor once, in order, by dtype; a larger one, or an empty first one, has a bucket of its own."""
    sizes = [0, 3, 4, 20, 2, 7, 3]
    tensors = [torch.empty(size, dtype=torch.float32) for size in sizes]
    tensors.insert(2, torch.empty(1, dtype=torch.float64))
    found = buckets(tensors, 4 * 8)
    assert [[tensor.numel() for tensor in bucket] for bucket in found] == [[0, 3, 4], [20], [2], [7], [3], [1]]
    assert [bucket[0].dtype for bucket in found] == [torch.float32] * 5 + [torch.float64]
    assert buckets([], 1) == []
    assert [len(bucket) for bucket in buckets(tensors[:1], 0)] == [1]
