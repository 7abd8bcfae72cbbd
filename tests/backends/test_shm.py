"""The shm backend: order of operations, asynchrony, ranks that die, and shared memory left behind.

tests/collectives tests the results of every operation.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from everyrank.backends import RECENT_CALLS, PythonGroup, register_backend
from everyrank.backends.engine import ENGINE, PendingWork
from everyrank.backends.operation_queue import OperationQueue, no_steps
from everyrank.backends.shm import no_shared_memory, segment
from everyrank.backends.shm.group import buffer_and_entry_bytes
from everyrank.backends.shm.messages import NUM_ENTRIES, Rings, num_ring_words
from everyrank.backends.transport import Transport
from everyrank.errors import CannotRunError, RankFailedError
from everyrank.launch import Launch, RankInfo, run_ranks
from everyrank.world import World, open_world

TIMEOUT_SECONDS = 20.0


def group_of(world: Any, seconds: float = TIMEOUT_SECONDS) -> Any:
    """Return a new group of all ranks, so that a failure in it does not break other tests."""
    register_backend("shm")
    return dist.new_group(backend="shm", timeout=datetime.timedelta(seconds=seconds))


# --- correct results in difficult cases


def odd_length_failures(world: Any) -> list[str]:
    """Return the operations with a wrong element. Lengths are near the ends of buffers and entries."""
    group, failures = group_of(world), []
    size, rank = world.size, world.rank
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64):
        buffer_length = 2**20 // dtype.itemsize
        for length in (1, 3, buffer_length - 1, buffer_length, buffer_length + 1, 2 * buffer_length + 7):
            local = (torch.arange(length) % 7 + rank).to(dtype)
            rank_tensors = [(torch.arange(length) % 7 + other_rank).to(dtype) for other_rank in range(size)]
            total = local.clone()
            dist.all_reduce(total, group=group)
            parts = [torch.empty_like(local) for _ in range(size)]
            dist.all_gather(parts, local, group=group)
            root = local.clone()
            dist.broadcast(root, group_src=size - 1, group=group)
            received = torch.empty_like(local)
            works = [dist.isend(local, group_dst=(rank + 1) % size, group=group)]
            works += [dist.irecv(received, group_src=(rank - 1) % size, group=group)]
            for work in works:
                work.wait()
            correct_by_name = {
                "all_reduce": torch.equal(total, torch.stack(rank_tensors).sum(0).to(dtype)),
                "all_gather": all(map(torch.equal, parts, rank_tensors)),
                "broadcast": torch.equal(root, rank_tensors[-1]),
                "exchange": torch.equal(received, rank_tensors[rank - 1]),
            }
            failures += [f"{name} {dtype} {length}" for name, is_correct in correct_by_name.items() if not is_correct]
    return failures


@pytest.mark.parametrize("count", [2, 3])
def test_lengths_near_the_end_of_a_buffer(ranks: Any, count: int) -> None:
    assert ranks(count, odd_length_failures) == [[]] * count


def count_yields(world: Any, cores: int) -> int:
    """Return how often a rank yields its core while it waits 50 ms for rank 0, on `cores` cores."""
    with mock.patch.object(ENGINE, "is_oversubscribed", False), mock.patch.object(os, "cpu_count", return_value=cores):
        group = group_of(world)
        dist.barrier(group=group)
        # a real yield may give the core to another test for a long time
        with mock.patch.object(os, "sched_yield") as sched_yield:
            if world.rank == 0:
                time.sleep(0.05)
            dist.all_reduce(torch.ones(3), group=group)
        return sched_yield.call_count


def test_ranks_sleep_instead_of_yielding_if_there_are_more_ranks_than_cores(ranks: Any) -> None:
    """On an oversubscribed machine, a rank that yields gets its core back before the rank that it waits for."""
    yields_on_1_core, yields_on_2_cores = (ranks(2, count_yields, cores)[1] for cores in (1, 2))
    assert yields_on_1_core <= 3
    assert yields_on_2_cores > 30


def count_calls_done_on_return(world: Any) -> int:
    """Return how many of ten asynchronous calls are complete on return. Rank 0 joins each 3 ms late."""
    group, num_done = group_of(world), 0
    with mock.patch.object(ENGINE, "is_oversubscribed", False):
        for _ in range(10):
            dist.barrier(group=group)
            if world.rank == 0:
                time.sleep(0.003)
            work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
            assert isinstance(work, PendingWork)
            num_done += work.done
            work.wait()
    return num_done


def test_asynchronous_call_polls_before_it_uses_the_thread(ranks: Any) -> None:
    """The thread would repeatedly take the GIL from the backward pass."""
    assert ranks(2, count_calls_done_on_return)[1] >= 5


def strided_results_are_equal(world: Any) -> list[bool]:
    """Return whether collectives of tensors with different strides are correct element by element."""
    group, rank = group_of(world), world.rank
    local = torch.arange(24.0).view(2, 3, 4) + rank
    expected_sum = torch.arange(24.0).view(2, 3, 4) * 2 + 1
    total = local.transpose(0, 2).contiguous().transpose(0, 2)  # column-major
    if rank == 1:
        total = local.clone()  # row-major on the other rank
    dist.all_reduce(total, group=group)
    gathered = torch.zeros(2, 3, 8)
    parts = [gathered[..., :4], gathered[..., 4:]]
    dist.all_gather(parts, local.permute(2, 1, 0).contiguous().permute(2, 1, 0), group=group)
    received = torch.zeros(4, 3).t()
    sending = dist.isend(local[0].t().contiguous().t(), group_dst=1 - rank, group=group)
    dist.recv(received, group_src=1 - rank, group=group)
    sending.wait()
    expected_peer = torch.arange(24.0).view(2, 3, 4) + 1 - rank
    return [
        torch.equal(total, expected_sum),
        torch.equal(parts[1 - rank], expected_peer),
        torch.equal(received, expected_peer[0]),
    ]


def test_collectives_of_strided_tensors(ranks: Any) -> None:
    assert ranks(2, strided_results_are_equal) == [[True] * 3] * 2


def gather_single_and_barrier(world: Any) -> list[Any]:
    """Call methods that torch 2.14 and 2.15 expect of a group. Return their results."""
    group, options = group_of(world), dist.GatherOptions()
    options.rootRank = 1
    gathered = torch.zeros(4, 3).t() if world.rank == 1 else torch.zeros(0)
    group.gather_single(gathered, torch.arange(6.0).view(3, 2) + 10 * world.rank, options).wait()
    barrier_error = ""
    try:
        dist.monitored_barrier(group=group)
    except ValueError as error:
        barrier_error = str(error)
    return [gathered.tolist(), barrier_error, group._supports_time_estimate]


def test_gather_single_and_unsupported_monitored_barrier(ranks: Any) -> None:
    first, second = ranks(2, gather_single_and_barrier)
    assert (first[0], first[2]) == ([], False)
    assert (second[0], second[2]) == ([[0, 1, 2, 3], [4, 5, 10, 11], [12, 13, 14, 15]], False)
    assert "monitored_barrier" in first[1]
    assert "monitored_barrier" in second[1]


def all_reduce_in_different_orders(world: Any) -> list[float]:
    """Start all-reduces in three groups, in a different order on each rank. Return the means of the tensors."""
    groups = [group_of(world) for _ in range(3)]
    order = [(0, 1, 2), (2, 1, 0), (1, 2, 0)][world.rank]
    tensors: dict[tuple[int, int], torch.Tensor] = {}
    works = []
    for group_index in order:
        for number in range(4):
            tensor = torch.full((300_000,), float(group_index * 10 + number + world.rank))
            tensors[group_index, number] = tensor
            works.append(dist.all_reduce(tensor, group=groups[group_index], async_op=True))
    for work in reversed(works):
        work.wait()
    return [float(tensors[key].mean()) for key in sorted(tensors)]


def test_ranks_may_use_groups_in_different_orders(ranks: Any) -> None:
    expected = [float(3 * (group_index * 10 + number) + 3) for group_index in range(3) for number in range(4)]
    assert ranks(3, all_reduce_in_different_orders) == [expected] * 3


def receive_by_tag(world: Any) -> list[Any]:
    """Receive messages by tag in reverse order and from any source. One is longer than the ring buffer."""
    group = group_of(world)
    long_tensor = torch.arange(2_000_000.0)
    if world.rank == 0:
        long_message, short_message = torch.zeros(2_000_000), torch.zeros(3)
        works = [
            dist.irecv(short_message, group=group, tag=8),
            dist.irecv(long_message, group_src=1, group=group, tag=7),
        ]
        for work in works:
            work.wait()
        senders = sorted(dist.recv(torch.zeros(1), group=group, tag=9) for _ in range(world.size - 1))
        return [short_message.tolist(), torch.equal(long_message, long_tensor), works[0].source_rank(), senders]
    works = []
    if world.rank == 1:
        works = [
            dist.isend(long_tensor, group_dst=0, group=group, tag=7),
            dist.isend(torch.ones(3), group_dst=0, group=group, tag=8),
        ]
    dist.send(torch.ones(1), group_dst=0, group=group, tag=9)
    for work in works:
        work.wait()
    return []


def test_receive_by_tag_and_from_any_source(ranks: Any) -> None:
    assert ranks(3, receive_by_tag)[0] == [[1.0] * 3, True, 1, [1, 2]]


def future_completes_without_wait(world: Any) -> bool:
    """Return whether the future of an all-reduce completes without `wait()` while this rank sleeps."""
    group = group_of(world)
    if world.rank == 1:
        time.sleep(0.2)
    tensor = torch.ones(3_000_000)
    future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not future.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    return future.done() and torch.equal(future.value()[0], torch.full((3_000_000,), 2.0))


def test_operation_progresses_without_wait(ranks: Any) -> None:
    assert ranks(2, future_completes_without_wait) == [True, True]


def call_after_a_pending_one(world: Any) -> list[float]:
    """Return the results of a pending all-reduce and of one started after it. Rank 1 starts late."""
    group, first, second = group_of(world), torch.ones(100_000), torch.full((3,), 5.0)
    time.sleep(0.05 * (world.rank == 1))
    work = dist.all_reduce(first, group=group, async_op=True)
    dist.all_reduce(second, group=group)
    assert work is not None
    work.wait()
    return [float(first.sum()), float(second.sum())]


def test_operations_run_in_the_order_of_the_calls(ranks: Any) -> None:
    assert ranks(2, call_after_a_pending_one) == [[200_000.0, 30.0]] * 2


def noted(world: Any) -> list[Any]:
    """Return the recorded calls, one complete and one pending, with line numbers relative to `noted`."""
    group, first_line = group_of(world), noted.__code__.co_firstlineno
    works = []
    dist.all_reduce(
        torch.ones(3),
        group=group,
    )
    if world.rank == 0:
        works += [dist.all_reduce(torch.ones(5).double(), group=group, async_op=True)]
    name = dist.distributed_c10d._world.pg_names[group]  # type: ignore[attr-defined]
    rows = [row for row in RECENT_CALLS.rows() if row[0] == name]
    dist.barrier()  # rank 1 has read its calls
    if world.rank == 1:
        works += [dist.all_reduce(torch.ones(5).double(), group=group, async_op=True)]
    for work in works:
        work.wait()
    return [[*row[1:6], row[8][1] - first_line, row[8][2]] for row in rows]


def test_recent_calls_have_state_and_source_line(ranks: Any) -> None:
    """Complete and pending calls are recorded. The line is that of the call, and not of its function."""
    complete_call = [1, "all_reduce", 3, "float32", True, 4, "noted"]
    pending_call = [2, "all_reduce", 5, "float64", False, 9, "noted"]
    assert ranks(2, noted) == [[complete_call, pending_call], [complete_call]]


def test_failed_operation_breaks_its_queue() -> None:
    """The call raises the error, and peers are notified. Later operations in the queue fail too."""
    notifications: list[str] = []

    def failing() -> Any:
        yield from ()
        raise RankFailedError("another call")

    queue = OperationQueue([0], 1.0, on_failure=lambda: notifications.append("failed"))
    with pytest.raises(RankFailedError, match="another call"):
        queue.try_finish(failing())
    assert notifications == ["failed"]
    assert not queue.try_finish(no_steps())
    with pytest.raises(RankFailedError, match="an earlier operation failed: another call"):
        ENGINE.start(PendingWork("shm all_reduce", queue, no_steps(), []))


def test_operation_is_queued_under_the_lock_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise another thread could run steps of the same queue in between."""
    early_releases: list[str] = []
    started_operations: list[str] = []

    class Lock:
        depth = 0

        def __enter__(self) -> None:
            self.depth += 1

        def __exit__(self, *_: object) -> None:
            self.depth -= 1
            if not self.depth and started_operations and not queue.operations:
                early_releases.append("released before the operation was queued")

    def pending_steps() -> Any:
        started_operations.append("barrier")
        while True:
            yield [1]

    monkeypatch.setattr(ENGINE, "lock", Lock())
    queue = OperationQueue([0, 1], 1.0)
    collectives: Any = SimpleNamespace(barrier=pending_steps)
    transport = Transport("shm", collectives, SimpleNamespace(queues=list), queue, lambda: None)  # type: ignore[arg-type]
    opts = dist.BarrierOptions()
    opts.asyncOp = False
    monkeypatch.setattr(ENGINE, "finish_or_leave", lambda work, _: work)
    PythonGroup(transport, 0, 2, "of this test").barrier(opts)
    assert started_operations
    assert not early_releases


def results_of_callbacks(world: World, waits_by_work: bool) -> list[float]:
    """Return the results of callbacks that start a collective and wait for its future, as torch's PowerSGD does.

    Rank 1 is late each time. The callback of rank 0 therefore runs in the engine's thread.
    If `waits_by_work` is set, it runs in the thread that waits for the work.
    """
    group, totals = group_of(world, 5.0), []

    def start_all_reduce(value: float) -> dist.Work:
        time.sleep(0.05 * (world.rank == 1))
        work = dist.all_reduce(torch.tensor([value]), group=group, async_op=True)
        assert work is not None
        return work

    def all_reduce_again(future_before: Any) -> Any:
        total = float(future_before.value()[0])
        totals.append(total)
        return start_all_reduce(total).get_future().wait()

    work = start_all_reduce(float(world.rank + 1))
    future = work.get_future().then(all_reduce_again).then(all_reduce_again)
    if waits_by_work:
        work.wait()
    totals.append(float(future.wait()[0]))
    return totals


@pytest.mark.parametrize("waits_by_work", [False, True])
def test_callbacks_may_start_collectives_and_wait_for_them(ranks: Any, waits_by_work: bool) -> None:
    """A wait for a future makes no progress by itself, and a callback holds the engine's lock."""
    assert ranks(2, results_of_callbacks, waits_by_work) == [[3.0, 6.0, 12.0]] * 2


# --- mismatched calls and missing ranks


def call_mismatched_operations(world: Any, difference: str) -> str:
    """Call a different operation, shape, dtype or message length on the two ranks. Return the error message."""
    group = group_of(world)
    local = torch.ones(8 if world.rank or difference != "shape" else 9)
    try:
        if difference == "operation" and world.rank == 0:
            dist.broadcast(local, group_src=0, group=group)
            dist.barrier(group=group)
        elif difference == "message":
            if world.rank == 0:
                dist.send(local, group_dst=1, group=group)
            else:
                dist.recv(torch.ones(3), group_src=0, group=group)
        else:
            dist.all_reduce(local.double() if difference == "dtype" and world.rank == 0 else local, group=group)
    except (RankFailedError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("difference", "fragment"),
    [
        ("operation", "all_reduce(8 elements of float32, sum"),
        ("shape", "all_reduce(9 elements of float32, sum"),
        ("dtype", "all_reduce(8 elements of float64, sum"),
        ("message", "rank 0 sent 32 bytes"),
    ],
)
def test_error_of_mismatched_calls_describes_the_other_call(ranks: Any, difference: str, fragment: str) -> None:
    start_time = time.monotonic()
    assert any(fragment in message for message in ranks(2, call_mismatched_operations, difference))
    assert time.monotonic() < start_time + TIMEOUT_SECONDS / 2, "the other rank waited for the one that gave up"


def all_reduce_without_rank_1(world: Any) -> str:
    """Return the error of an all-reduce that rank 1 does not call."""
    group = group_of(world, seconds=0.5)
    if world.rank == 1:
        return ""
    try:
        dist.all_reduce(torch.ones(3), group=group)
    except RankFailedError as error:
        return str(error)
    return "nothing"


def test_timeout_names_the_rank_that_did_not_call(ranks: Any) -> None:
    """Two of three ranks call the all-reduce. Their errors name rank 1."""
    first, second, third = ranks(3, all_reduce_without_rank_1)
    messages = {0: first, 2: third}
    assert second == ""
    for rank, message in messages.items():
        assert "shm all_reduce timed out after 0.5 s" in message, rank
        assert "1" in message.partition("rank")[2]


OPERATIONS = {
    "all_reduce": lambda tensor, group: dist.all_reduce(tensor, group=group),
    "reduce_scatter": lambda tensor, group: dist.reduce_scatter_tensor(
        tensor[: len(tensor) // 2].clone(), tensor, group=group
    ),
    "all_gather": lambda tensor, group: dist.all_gather([tensor, tensor.clone()], tensor.clone(), group=group),
    "all_to_all": lambda tensor, group: dist.all_to_all_single(tensor.clone(), tensor, group=group),
    "broadcast": lambda tensor, group: dist.broadcast(tensor, group_src=1, group=group),
    "gather": lambda tensor, group: dist.gather(
        tensor, [tensor.clone(), tensor.clone()] if dist.get_rank() == 0 else None, group_dst=0, group=group
    ),
    "barrier": lambda _, group: dist.barrier(group=group),
    "recv": lambda tensor, group: (dist.recv if dist.get_rank() == 0 else dist.send)(
        tensor, 1 - dist.get_rank(), group
    ),
}


def kill_rank_1_in(info: RankInfo, launch: Launch, name: str, folder: Path) -> None:
    """Kill rank 1 with a timer during repeated calls. Rank 0 writes the error and its delay to a file."""
    with open_world(info, launch) as world:
        group, tensor = group_of(world), torch.ones(1_000_000)
        OPERATIONS[name](tensor, group)
        if world.rank == 1:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        start_time = time.monotonic()
        try:
            while time.monotonic() < start_time + TIMEOUT_SECONDS:
                OPERATIONS[name](tensor, group)
        except RankFailedError as error:
            (folder / "error").write_text(f"{time.monotonic() - start_time:.3f} {error}")
            raise


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("name", OPERATIONS)
def test_rank_killed_in_an_operation_is_named(tmp_path: Path, name: str) -> None:
    """The other rank fails long before the timeout. No file is left in shared memory."""
    launch = Launch(processes=2, timeout_seconds=TIMEOUT_SECONDS)
    with pytest.raises(RankFailedError, match="rank 1"):
        run_ranks(launch, kill_rank_1_in, launch, name, tmp_path)
    if (tmp_path / "error").exists():  # the launcher may have ended it first
        seconds, _, message = (tmp_path / "error").read_text().partition(" ")
        assert float(seconds) < TIMEOUT_SECONDS / 2
        assert message.startswith("shm ")
        assert "rank 1 (process " in message
        assert message.endswith("has ended")
    assert not list(Path("/dev/shm").glob("*everyrank*"))


def count_wrong_messages(world: Any, rounds: int) -> int:
    """Return the number of wrong messages that arrive while the engine's thread and this thread both receive."""
    group, num_wrong = group_of(world), 0
    if world.rank == 1:
        for number in range(rounds):
            dist.send(torch.tensor([float(number)]), group_dst=0, group=group, tag=number % 3)
        dist.send(torch.zeros(1), group_dst=0, group=group, tag=99)
        return 0
    # this receive keeps the engine's thread active
    pending_receive = dist.irecv(torch.zeros(1), group_src=1, group=group, tag=99)
    for number in range(rounds):
        received = torch.full((1,), -1.0)
        dist.irecv(received, group_src=1, group=group, tag=number % 3).wait()
        num_wrong += float(received) != number
    pending_receive.wait()
    return num_wrong


def test_concurrent_receives_take_the_right_messages(ranks: Any) -> None:
    assert ranks(2, count_wrong_messages, 500) == [0, 0]


def test_receive_is_started_under_the_engine_lock() -> None:
    """The race in the test above is too rare to find a missing lock."""
    lock_states: list[bool] = []

    class Messages:
        def receive(self, *_: Any) -> Any:
            lock_states.append(ENGINE.lock._is_owned())  # type: ignore[attr-defined]
            return OperationQueue([0], 1.0), iter(())

        def queues(self) -> list[OperationQueue]:
            return []

    transport: Any = Transport("shm", None, Messages(), OperationQueue([0], 1.0), lambda: None)  # type: ignore[arg-type]
    with contextlib.suppress(Exception):
        PythonGroup(transport, 0, 1, "of this test").recv([torch.zeros(1)], 0, 0)
    assert lock_states == [True]


def test_receive_does_not_buffer_later_messages() -> None:
    """A receive takes its own message from the ring, and none that come after it."""
    state_words, entries = [0] * num_ring_words(2), torch.zeros(4, NUM_ENTRIES, 64, dtype=torch.uint8)
    sender, receiver = (
        Rings(
            rank, 2, (0, 1), state_words, 0, entries, lambda is_any: OperationQueue([0, 1], 1.0, from_any_source=is_any)
        )
        for rank in (0, 1)
    )
    for number in range(4):
        assert list(sender.send(torch.full((20,), float(number)), 1, 7)[1]) == []
    for number in range(4):
        received = torch.zeros(20)
        assert list(receiver.receive(received, 0 if number % 2 else None, 7)[1]) == []
        assert received.tolist() == [number] * 20
        assert receiver.unexpected == []


def receive_after_a_timeout(world: Any) -> list[Any]:
    """Time out in a receive, and receive again with the same tag."""
    group = group_of(world)
    if world.rank == 1:
        time.sleep(0.5)
        dist.send(torch.ones(3), group_dst=0, group=group, tag=1)
        return []
    timed_out, received = torch.zeros(3), torch.zeros(3)
    try:
        dist.irecv(timed_out, group_src=1, group=group, tag=1).wait(datetime.timedelta(seconds=0.1))
    except RankFailedError as error:
        message = str(error)
    dist.recv(received, group_src=1, group=group, tag=1)
    return [message, timed_out.tolist(), received.tolist()]


def test_receive_that_timed_out_takes_no_message(ranks: Any) -> None:
    message, timed_out, received = ranks(2, receive_after_a_timeout)[0]
    assert "shm recv timed out after 0.1 s" in message
    assert (timed_out, received) == ([0.0] * 3, [1.0] * 3)


def timeout_in_another_group(world: Any) -> str:
    """Time out in a receive of one group, and wait for a receive of another group."""
    groups = [group_of(world) for _ in range(2)]
    tensor = torch.zeros(3)
    if world.rank == 1:
        time.sleep(0.6)
        dist.send(torch.ones(3), group_dst=0, group=groups[0])
        return ""
    work = dist.irecv(tensor, group_src=1, group=groups[0])
    try:
        dist.irecv(torch.zeros(1), group_src=1, group=groups[1]).wait(datetime.timedelta(seconds=0.2))
    except RankFailedError:
        work.wait()
    return str(tensor.tolist())


def test_timeout_applies_to_one_operation_only(ranks: Any) -> None:
    assert ranks(2, timeout_in_another_group)[0] == "[1.0, 1.0, 1.0]"


def count_empty_pending_queues(world: Any) -> int:
    """Return the number of pending queues without an operation after an operation has timed out."""
    group = group_of(world)
    if world.rank == 1:
        time.sleep(0.6)
        return 0
    with pytest.raises(RankFailedError, match="rank 1 did not come"):
        dist.all_reduce(torch.ones(3), group=group, async_op=True).wait(datetime.timedelta(seconds=0.2))  # type: ignore[union-attr]
    assert ENGINE.thread is not None
    return sum(not queue.operations for queue in ENGINE.pending_queues)


def test_timed_out_operation_leaves_no_pending_queue(ranks: Any) -> None:
    assert ranks(2, count_empty_pending_queues)[0] == 0


def all_to_all_with_wrong_sizes(world: Any) -> str:
    """Return the error of an all-to-all in which rank 0 sends more than rank 1 expects."""
    group = group_of(world)
    sizes = [1, 2] if world.rank == 0 else [1, 1]
    try:
        dist.all_to_all_single(torch.zeros(2), torch.zeros(sum(sizes)), [1, 1], sizes, group=group)
        dist.barrier(group=group)
    except (RankFailedError, RuntimeError) as error:
        return str(error)
    return ""


def test_error_of_one_rank_reaches_the_others(ranks: Any) -> None:
    """Rank 1 fails because of the length. Rank 0 does not wait for it until the timeout."""
    start_time = time.monotonic()
    first, second = ranks(2, all_to_all_with_wrong_sizes)
    assert all(fragment in second for fragment in ("rank 0 sends 8 bytes", "rank 1", "4"))
    assert "rank 1 has failed in this group" in first
    assert time.monotonic() < start_time + TIMEOUT_SECONDS / 2


def call_with_invalid_arguments(world: Any) -> list[str]:
    """Return the errors of invalid calls, and the results of valid calls in the same group after them."""
    group, errors = group_of(world), []
    for tensor, reduction in (
        (torch.ones(2), dist.ReduceOp.BAND),
        (torch.ones(2, dtype=torch.int64), dist.ReduceOp.AVG),
    ):
        try:
            dist.all_reduce(tensor, op=reduction, group=group)
        except RuntimeError as error:
            errors.append(str(error))
    try:
        dist.all_gather_into_tensor(torch.zeros(2 * world.size + 1), torch.zeros(2), group=group)
    except (RuntimeError, ValueError) as error:
        errors.append(type(error).__name__)
    strided = torch.arange(6.0)[::3][:1] + world.rank  # one element with a different stride
    strided_view = torch.arange(6.0).view(2, 3)[:1, 0]
    parts = [torch.empty(1) for _ in range(world.size)]
    dist.all_gather(parts, strided_view, group=group)
    dist.all_reduce(strided, group=group)
    return [*errors, str(strided.tolist()), str([part.tolist() for part in parts])]


def test_invalid_arguments_do_not_break_the_group(ranks: Any) -> None:
    for band, avg, gather, strided, parts in ranks(2, call_with_invalid_arguments):
        assert "reduction band of torch.float32" in band
        assert "reduction avg of torch.int64" in avg
        assert gather in ("RuntimeError", "ValueError")
        assert (strided, parts) == ("[1.0]", "[[0.0], [0.0]]")


def test_buffers_are_whole_pages_for_any_number_of_ranks() -> None:
    """Each rank's share of a buffer holds at least one element of every dtype."""
    for size in range(1, 257):
        buffer, entry = buffer_and_entry_bytes(size)
        assert buffer % 4096 == entry % 4096 == 0
        assert buffer // size >= 64
        assert entry > 0
        if size <= 160:
            assert 2 * size * buffer + size * size * NUM_ENTRIES * entry < 2**30
    with pytest.raises(CannotRunError, match="too many"):
        buffer_and_entry_bytes(100_000)


def count_wrong_elements_in_rounds(info: RankInfo, launch: Launch, rounds: int) -> int:
    """Return the number of wrong elements in many rounds of different operations."""
    with open_world(info, launch) as world:
        group, num_wrong = world.group, 0
        for number in range(rounds):
            length = 1 + (number * 7919) % 70_000
            tensor = torch.full((length,), float(world.rank + number))
            work = dist.all_reduce(tensor, group=group, async_op=True)
            local = torch.full((length,), world.rank)
            parts = [torch.empty_like(local) for _ in range(world.size)]
            dist.all_gather(parts, local, group=group)
            received = torch.empty_like(local)
            works = [dist.isend(local, group_dst=(world.rank + 1) % world.size, group=group)]
            works += [dist.irecv(received, group_src=(world.rank - 1) % world.size, group=group), work]
            for pending_work in works:
                pending_work.wait()
            expected_sum = sum(range(world.size)) + world.size * number
            num_wrong += int((tensor != expected_sum).sum()) + int((received != (world.rank - 1) % world.size).sum())
            num_wrong += sum(int((part != rank).sum()) for rank, part in enumerate(parts))
        return num_wrong


@pytest.mark.usefixtures("python")
def test_operations_with_more_ranks_than_cores_are_correct() -> None:
    launch = Launch(processes=4, backend="shm", timeout_seconds=120.0)
    assert run_ranks(launch, count_wrong_elements_in_rounds, launch, 50) == dict.fromkeys(range(4), 0)


# --- machines without shm support


@pytest.mark.parametrize("name", ["memfd_create", "pidfd_open"])
def test_refused_system_call_is_reported(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """An old kernel or a container may refuse it."""

    def refuse_call(*_: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(segment.os, name, refuse_call)
    assert "rank 0: PermissionError: Operation not permitted" in no_shared_memory(dist.HashStore(), 0, 1, 1.0)


def test_group_name_may_be_reused() -> None:
    store = dist.HashStore()
    for _ in range(2):
        memory, peers = segment.map_shared(store, 0, 1, [0], 4096, 5.0)
        assert memory[0] == 0
        memory[0] = 1
        memory.close()
        peers.close()


def test_unsupported_machine_is_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    assert no_shared_memory(store, 0, 1, 1.0) == ""
    monkeypatch.setattr(segment.platform, "machine", lambda: "aarch64")
    assert "strong memory order" in no_shared_memory(store, 0, 1, 1.0)
    monkeypatch.setattr(segment.sys, "platform", "darwin")
    assert "needs Linux" in no_shared_memory(store, 0, 1, 1.0)


def run_without_shared_memory(info: RankInfo, launch: Launch) -> str:
    """Run an all-reduce while rank 1 cannot open the memory of rank 0, as in separate containers."""
    if info.rank == 1:
        segment.os.open = raise_file_not_found  # type: ignore[assignment]
    with open_world(info, launch) as world:
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        return f"{world.choices['backend']} {tensor.tolist()}"


def raise_file_not_found(*_: Any, **__: Any) -> int:
    raise FileNotFoundError(2, "No such file or directory")


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("backend", [None, "shm"])
def test_ranks_without_shared_memory_use_gloo_or_refuse_shm(backend: str | None) -> None:
    """The default backend becomes gloo. An explicit `--backend shm` is refused."""
    launch = Launch(processes=2, backend=backend)
    if backend is None:
        results = run_ranks(launch, run_without_shared_memory, launch)
        assert results[0] == results[1]
        assert re.match(r"gloo: the ranks cannot share memory: rank 1: FileNotFoundError.* \[2\.0, 2\.0\]$", results[0])
    else:
        with pytest.raises(CannotRunError, match=r"--backend shm: .*use --backend gloo"):
            run_ranks(launch, run_without_shared_memory, launch)
