"""Buffers of asynchronous collectives hold NaN until `wait()`. Code that waits gets correct results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import all_reduce as imported_all_reduce
from torch.nn.parallel import DistributedDataParallel

from everyrank.backends.async_buffers import active_async_calls, nan_until_wait

pytestmark = pytest.mark.integration


def group_of(world: Any, backend: str) -> Any:
    """Return the group of the world for its own backend, or a new group."""
    return world.group if backend == world.backend else dist.new_group(backend=backend)


def all_calls(group: Any, rank: int, size: int) -> list[tuple[str, Any, list[Tensor], list[Tensor]]]:
    """Start each collective and return (name, work, buffers, expected contents), without waiting."""
    local = torch.arange(4.0) + rank
    rank_tensors = [torch.arange(4.0) + rank_index for rank_index in range(size)]
    total = torch.stack(rank_tensors).sum(0)
    calls: list[tuple[str, Any, list[Tensor], list[Tensor]]] = []
    gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name since torch 2.13

    def add(name: str, work: Any, buffers: list[Tensor], expected: list[Tensor]) -> None:
        calls.append((name, work, buffers, expected))

    value = local.clone()
    add("all_reduce", dist.all_reduce(value, group=group, async_op=True), [value], [total])
    value = local.clone()
    add("imported before", imported_all_reduce(value, group=group, async_op=True), [value], [total])
    value = local.clone()
    add("positional", dist.all_reduce(value, dist.ReduceOp.SUM, group, True), [value], [total])
    value = local.clone() if rank == 0 else torch.zeros(4)
    add("broadcast", dist.broadcast(value, 0, group=group, async_op=True), [value], [rank_tensors[0]])
    outputs = [torch.zeros(4) for _ in range(size)]
    add("all_gather", dist.all_gather(outputs, local, group=group, async_op=True), outputs, rank_tensors)
    output = torch.zeros(4 * size)
    add("into", gather_into(output, local, group=group, async_op=True), [output], [torch.cat(rank_tensors)])
    output = torch.zeros(4 * size)
    local_part = output[4 * rank : 4 * rank + 4]  # in place, as in FSDP
    local_part.copy_(local)
    add("in place", gather_into(output, local_part, group=group, async_op=True), [output], [torch.cat(rank_tensors)])
    output = torch.zeros(size)
    inputs = torch.arange(float(size)) + 10 * rank
    expected = torch.tensor([10.0 * rank_index + rank for rank_index in range(size)])
    add("all_to_all_single", dist.all_to_all_single(output, inputs, group=group, async_op=True), [output], [expected])
    return calls


def failures_of_waiting(world: Any, backend: str, end: str) -> list[str]:
    """Return the calls whose buffers were not NaN before waiting, or not correct after it."""
    group, failures = group_of(world, backend), []
    with nan_until_wait() as calls:
        for name, work, buffers, expected in all_calls(group, world.rank, world.size):
            is_root = name == "broadcast" and world.rank == 0
            if not is_root and not all(bool(buffer.isnan().all()) for buffer in buffers):
                failures.append(f"{name}: not NaN")
            if end == "wait":
                work.wait()
            elif end == "future":
                value = work.get_future().wait()
                failures += [f"{name}: value"] if not torch.equal(_first_tensor(value), expected[0]) else []
            else:
                while not work.is_completed():
                    pass
            if not all(
                torch.equal(tensor, expected_tensor) for tensor, expected_tensor in zip(buffers, expected, strict=True)
            ):
                failures.append(f"{name}: {buffers}")
        assert all("in all_calls" in location for location in calls.locations)
    assert active_async_calls() is None
    value = torch.ones(2)
    work = dist.all_reduce(value, group=group, async_op=True)
    work.wait()
    failures += [] if type(work).__name__ != "DelayedWork" and float(value[0]) == world.size else ["after"]
    return failures


def _first_tensor(value: Any) -> Tensor:
    while not isinstance(value, Tensor):
        value = value[0]
    return value


@pytest.mark.parametrize("end", ["wait", "future", "is_completed"])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_waiting_gives_the_result_of_each_collective(ranks: Any, backend: str, end: str) -> None:
    """The backends are shm and gloo. Each of the three ways to wait is tested."""
    assert ranks(2, failures_of_waiting, backend, end) == [[], []]


def exchange_messages(world: Any) -> list[float]:
    """Return a received value before and after waiting, and one of a batched receive."""
    peer = 1 - world.rank
    with nan_until_wait():
        received, batched = torch.zeros(1), torch.zeros(1)
        work = dist.irecv(received, peer, group=world.group)
        value_before_wait = float(received)
        dist.send(torch.tensor([5.0 + world.rank]), peer, group=world.group)
        assert work is not None
        work.wait()
        ops = [
            dist.P2POp(dist.isend, torch.tensor([7.0 + world.rank]), peer, group=world.group),
            dist.P2POp(dist.irecv, batched, peer, group=world.group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    return [value_before_wait, float(received), float(batched)]


def test_receives_are_nan_until_wait(ranks: Any) -> None:
    """One receive is single, and one is in a batch."""
    for rank, (value_before_wait, received, batched) in enumerate(ranks(2, exchange_messages)):
        assert value_before_wait != value_before_wait
        assert (received, batched) == (6.0 - rank, 8.0 - rank)


def saved_for_backward(world: Any) -> float:
    """Sum a gradient whose buffer autograd saved before the all-reduce ended. The late result is no in-place change."""
    weight = torch.ones(2, requires_grad=True)
    buffer = torch.full((2,), 1.0 + world.rank)
    with nan_until_wait():
        work = dist.all_reduce(buffer, group=world.group, async_op=True)
        product = weight * buffer  # the product is NaN; backward reads the result
        work.wait()
        product.sum().backward()
    assert weight.grad is not None
    return float(weight.grad.sum())


def by_libraries(world: Any) -> list[str]:
    """Run DistributedDataParallel, FSDP and functional collectives. Return the locations of the user code's calls."""
    from torch.distributed._functional_collectives import all_reduce
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    with nan_until_wait() as calls:
        for wrap in (lambda model: DistributedDataParallel(model, process_group=world.group), fully_shard):
            model: Any = wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
            model(torch.full((2, 3), 1.0 + world.rank)).sum().backward()
            for parameter in model.parameters():
                assert bool(getattr(parameter.grad, "_local_tensor", parameter.grad).isfinite().all())
        assert float(all_reduce(torch.ones(1), "sum", world.group)) == world.size
        return list(calls.locations)


def only_some(world: Any) -> list[bool]:
    """Return whether buffers are NaN when the call's location is selected, and when it is not."""

    def start() -> tuple[Tensor, Any]:
        value = torch.ones(1)
        return value, dist.all_reduce(value, group=world.group, async_op=True)

    with nan_until_wait() as calls:
        start()[1].wait()
        [location] = calls.locations
        are_nan = []
        for locations in ([location], []):
            with calls.limited_to(*locations):
                value, work = start()
                are_nan.append(bool(value.isnan()))
                work.wait()
    return are_nan


@pytest.mark.parametrize(
    ("function", "expected"), [(saved_for_backward, 6.0), (by_libraries, []), (only_some, [True, False])]
)
def test_correct_code_is_not_changed(ranks: Any, function: Callable[..., Any], expected: Any) -> None:
    """Tensors that autograd saved, collectives of libraries, and lines that are not selected."""
    assert ranks(2, function) == [expected, expected]
