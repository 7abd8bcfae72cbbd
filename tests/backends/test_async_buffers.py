"""Buffers of asynchronous collectives hold NaN until they are waited for; code that waits gets the right numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import all_reduce as imported_before
from torch.nn.parallel import DistributedDataParallel

from everyrank.backends.async_buffers import active_async_calls, nan_until_wait

pytestmark = pytest.mark.integration


def group_of(world: Any, backend: str) -> Any:
    """The world's own group, over shm; or one of gloo."""
    return world.group if backend == world.backend else dist.new_group(backend=backend)


def all_calls(group: Any, rank: int, size: int) -> list[tuple[str, Any, list[Tensor], list[Tensor]]]:
    """(name, work, buffers, what they hold in the end) of each collective, started and not waited for."""
    own = torch.arange(4.0) + rank
    rows = [torch.arange(4.0) + other for other in range(size)]
    total = torch.stack(rows).sum(0)
    found: list[tuple[str, Any, list[Tensor], list[Tensor]]] = []
    gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name from torch 2.13 on

    def note(name: str, work: Any, buffers: list[Tensor], expected: list[Tensor]) -> None:
        found.append((name, work, buffers, expected))

    value = own.clone()
    note("all_reduce", dist.all_reduce(value, group=group, async_op=True), [value], [total])
    value = own.clone()
    note("imported before", imported_before(value, group=group, async_op=True), [value], [total])
    value = own.clone()
    note("positional", dist.all_reduce(value, dist.ReduceOp.SUM, group, True), [value], [total])
    value = own.clone() if rank == 0 else torch.zeros(4)
    note("broadcast", dist.broadcast(value, 0, group=group, async_op=True), [value], [rows[0]])
    outs = [torch.zeros(4) for _ in range(size)]
    note("all_gather", dist.all_gather(outs, own, group=group, async_op=True), outs, rows)
    out = torch.zeros(4 * size)
    note("into", gather_into(out, own, group=group, async_op=True), [out], [torch.cat(rows)])
    out = torch.zeros(4 * size)
    part = out[4 * rank : 4 * rank + 4]  # in place, as FSDP does it
    part.copy_(own)
    note("in place", gather_into(out, part, group=group, async_op=True), [out], [torch.cat(rows)])
    out = torch.zeros(size)
    sent = torch.arange(float(size)) + 10 * rank
    expected = torch.tensor([10.0 * other + rank for other in range(size)])
    note("all_to_all_single", dist.all_to_all_single(out, sent, group=group, async_op=True), [out], [expected])
    return found


def waited(world: Any, backend: str, end: str) -> list[str]:
    """The calls that were not NaN before, or not right after they had been waited for."""
    group, wrong = group_of(world, backend), []
    with nan_until_wait() as calls:
        for name, work, buffers, expected in all_calls(group, world.rank, world.size):
            is_root = name == "broadcast" and world.rank == 0
            if not is_root and not all(bool(buffer.isnan().all()) for buffer in buffers):
                wrong.append(f"{name}: not NaN")
            if end == "wait":
                work.wait()
            elif end == "future":
                value = work.get_future().wait()
                wrong += [f"{name}: value"] if not torch.equal(_first(value), expected[0]) else []
            else:
                while not work.is_completed():
                    pass
            if not all(torch.equal(one, other) for one, other in zip(buffers, expected, strict=True)):
                wrong.append(f"{name}: {buffers}")
        assert all("in all_calls" in location for location in calls.locations)
    assert active_async_calls() is None
    value = torch.ones(2)
    work = dist.all_reduce(value, group=group, async_op=True)
    work.wait()
    wrong += [] if type(work).__name__ != "DelayedWork" and float(value[0]) == world.size else ["after"]
    return wrong


def _first(value: Any) -> Tensor:
    while not isinstance(value, Tensor):
        value = value[0]
    return value


@pytest.mark.parametrize("end", ["wait", "future", "is_completed"])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_who_waits_gets_the_result(ranks: Any, backend: str, end: str) -> None:
    """Each collective, over our own backend and torch's, by each way to wait."""
    assert ranks(2, waited, backend, end) == [[], []]


def messages(world: Any) -> list[float]:
    peer = 1 - world.rank
    with nan_until_wait():
        received, both = torch.zeros(1), torch.zeros(1)
        work = dist.irecv(received, peer, group=world.group)
        early = float(received)
        dist.send(torch.tensor([5.0 + world.rank]), peer, group=world.group)
        assert work is not None
        work.wait()
        ops = [
            dist.P2POp(dist.isend, torch.tensor([7.0 + world.rank]), peer, group=world.group),
            dist.P2POp(dist.irecv, both, peer, group=world.group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    return [early, float(received), float(both)]


def test_messages(ranks: Any) -> None:
    """Receives, alone and in a batch."""
    for rank, (early, received, both) in enumerate(ranks(2, messages)):
        assert early != early
        assert (received, both) == (6.0 - rank, 8.0 - rank)


def saved_for_backward(world: Any) -> float:
    """A buffer that autograd keeps: the result that comes later is no change in place."""
    weight = torch.ones(2, requires_grad=True)
    buffer = torch.full((2,), 1.0 + world.rank)
    with nan_until_wait():
        work = dist.all_reduce(buffer, group=world.group, async_op=True)
        product = weight * buffer  # reads it early: NaN; backward reads the result
        work.wait()
        product.sum().backward()
    assert weight.grad is not None
    return float(weight.grad.sum())


def by_libraries(world: Any) -> list[str]:
    """DistributedDataParallel and functional collectives, whose buffers are none of user code."""
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
    def start() -> tuple[Tensor, Any]:
        value = torch.ones(1)
        return value, dist.all_reduce(value, group=world.group, async_op=True)

    with nan_until_wait() as calls:
        start()[1].wait()
        [location] = calls.locations
        found = []
        for locations in ([location], []):
            with calls.limited_to(*locations):
                value, work = start()
                found.append(bool(value.isnan()))
                work.wait()
    return found


@pytest.mark.parametrize(
    ("function", "expected"), [(saved_for_backward, 6.0), (by_libraries, []), (only_some, [True, False])]
)
def test_code_that_waits(ranks: Any, function: Callable[..., Any], expected: Any) -> None:
    """What autograd has saved, what libraries call, and lines that are left as they are."""
    assert ranks(2, function) == [expected, expected]
