"""Backend shm: what tests/collectives do not ask of a backend: order, asynchrony, ends of ranks, memory left behind."""

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

SECONDS = 20.0


def group_of(world: Any, seconds: float = SECONDS) -> Any:
    """All ranks, a group of its own: what fails in it spoils no other."""
    register_backend("shm")
    return dist.new_group(backend="shm", timeout=datetime.timedelta(seconds=seconds))


# --- right answers where they are hard


def long_and_odd(world: Any) -> list[str]:
    """Lengths around the ends of slots and cells, every dtype width: those with a wrong element."""
    group, wrong = group_of(world), []
    size, rank = world.size, world.rank
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64):
        slot = 2**20 // dtype.itemsize
        for length in (1, 3, slot - 1, slot, slot + 1, 2 * slot + 7):
            own = (torch.arange(length) % 7 + rank).to(dtype)
            everybody = [(torch.arange(length) % 7 + one).to(dtype) for one in range(size)]
            total = own.clone()
            dist.all_reduce(total, group=group)
            parts = [torch.empty_like(own) for _ in range(size)]
            dist.all_gather(parts, own, group=group)
            root = own.clone()
            dist.broadcast(root, group_src=size - 1, group=group)
            passed = torch.empty_like(own)
            works = [dist.isend(own, group_dst=(rank + 1) % size, group=group)]
            works += [dist.irecv(passed, group_src=(rank - 1) % size, group=group)]
            for work in works:
                work.wait()
            found = {
                "all_reduce": torch.equal(total, torch.stack(everybody).sum(0).to(dtype)),
                "all_gather": all(map(torch.equal, parts, everybody)),
                "broadcast": torch.equal(root, everybody[-1]),
                "exchange": torch.equal(passed, everybody[rank - 1]),
            }
            wrong += [f"{name} {dtype} {length}" for name, right in found.items() if not right]
    return wrong


@pytest.mark.parametrize("count", [2, 3])
def test_long_and_odd_lengths(ranks: Any, count: int) -> None:
    assert ranks(count, long_and_odd) == [[]] * count


def yields(world: Any, cores: int) -> int:
    """How often the core is given away in a wait of 50 ms for rank 0, on a machine of so many cores."""
    with mock.patch.object(ENGINE, "is_oversubscribed", False), mock.patch.object(os, "cpu_count", return_value=cores):
        group = group_of(world)
        dist.barrier(group=group)
        # given away in earnest, the core may stay with another test for as long as is yielded here
        with mock.patch.object(os, "sched_yield") as given:
            if world.rank == 0:
                time.sleep(0.05)
            dist.all_reduce(torch.ones(3), group=group)
        return given.call_count


def test_more_ranks_than_cores_sleep(ranks: Any) -> None:
    """Who yields is given the core back before who is waited for; with a core for each, a yield is soonest over."""
    crowded, roomy = (ranks(2, yields, cores)[1] for cores in (1, 2))
    assert crowded <= 3
    assert roomy > 30


def soon_joined(world: Any) -> int:
    """How many of ten asynchronous calls that rank 0 joins three milliseconds late are done when they return."""
    group, done = group_of(world), 0
    with mock.patch.object(ENGINE, "is_oversubscribed", False):
        for _ in range(10):
            dist.barrier(group=group)
            if world.rank == 0:
                time.sleep(0.003)
            work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
            assert isinstance(work, PendingWork)
            done += work.done
            work.wait()
    return done


def test_who_is_soon_joined_needs_no_thread(ranks: Any) -> None:
    """A thread would take Python's lock from the backward that it was left to, again and again."""
    assert ranks(2, soon_joined)[1] >= 5


def strided(world: Any) -> list[bool]:
    """Tensors that are not contiguous, by elements and not by their place in memory."""
    group, rank = group_of(world), world.rank
    plain = torch.arange(24.0).view(2, 3, 4) + rank
    both = torch.arange(24.0).view(2, 3, 4) * 2 + 1
    total = plain.transpose(0, 2).contiguous().transpose(0, 2)  # columns first in memory
    if rank == 1:
        total = plain.clone()  # and rows first on the other rank
    dist.all_reduce(total, group=group)
    wide = torch.zeros(2, 3, 8)
    parts = [wide[..., :4], wide[..., 4:]]
    dist.all_gather(parts, plain.permute(2, 1, 0).contiguous().permute(2, 1, 0), group=group)
    received = torch.zeros(4, 3).t()
    other = dist.isend(plain[0].t().contiguous().t(), group_dst=1 - rank, group=group)
    dist.recv(received, group_src=1 - rank, group=group)
    other.wait()
    theirs = torch.arange(24.0).view(2, 3, 4) + 1 - rank
    return [torch.equal(total, both), torch.equal(parts[1 - rank], theirs), torch.equal(received, theirs[0])]


def test_tensors_that_are_not_contiguous(ranks: Any) -> None:
    assert ranks(2, strided) == [[True] * 3] * 2


def gathered_into_one(world: Any) -> list[Any]:
    """What torch 2.14 and 2.15 ask of a group: gather_single, monitored_barrier, whether it can estimate times."""
    group, options = group_of(world), dist.GatherOptions()
    options.rootRank = 1
    whole = torch.zeros(4, 3).t() if world.rank == 1 else torch.zeros(0)
    group.gather_single(whole, torch.arange(6.0).view(3, 2) + 10 * world.rank, options).wait()
    said = ""
    try:
        dist.monitored_barrier(group=group)
    except ValueError as error:
        said = str(error)
    return [whole.tolist(), said, group._supports_time_estimate]


def test_gather_into_one_tensor(ranks: Any) -> None:
    first, second = ranks(2, gathered_into_one)
    assert (first[0], first[2]) == ([], False)
    assert (second[0], second[2]) == ([[0, 1, 2, 3], [4, 5, 10, 11], [12, 13, 14, 15]], False)
    assert "monitored_barrier" in first[1]
    assert "monitored_barrier" in second[1]


def in_any_order(world: Any) -> list[float]:
    """Three groups, started in another order on each rank, several at once in each, waited for in yet another."""
    groups = [group_of(world) for _ in range(3)]
    order = [(0, 1, 2), (2, 1, 0), (1, 2, 0)][world.rank]
    tensors: dict[tuple[int, int], torch.Tensor] = {}
    works = []
    for place in order:
        for number in range(4):
            tensor = torch.full((300_000,), float(place * 10 + number + world.rank))
            tensors[place, number] = tensor
            works.append(dist.all_reduce(tensor, group=groups[place], async_op=True))
    for work in reversed(works):
        work.wait()
    return [float(tensors[key].mean()) for key in sorted(tensors)]


def test_groups_are_started_in_any_order(ranks: Any) -> None:
    right = [float(3 * (place * 10 + number) + 3) for place in range(3) for number in range(4)]
    assert ranks(3, in_any_order) == [right] * 3


def by_tag(world: Any) -> list[Any]:
    """Later messages first, of any source, and one that is longer than the ring while nobody has asked for it."""
    group = group_of(world)
    long = torch.arange(2_000_000.0)
    if world.rank == 0:
        first, second = torch.zeros(2_000_000), torch.zeros(3)
        works = [dist.irecv(second, group=group, tag=8), dist.irecv(first, group_src=1, group=group, tag=7)]
        for work in works:
            work.wait()
        senders = sorted(dist.recv(torch.zeros(1), group=group, tag=9) for _ in range(world.size - 1))
        return [second.tolist(), torch.equal(first, long), works[0].source_rank(), senders]
    works = []
    if world.rank == 1:
        works = [
            dist.isend(long, group_dst=0, group=group, tag=7),
            dist.isend(torch.ones(3), group_dst=0, group=group, tag=8),
        ]
    dist.send(torch.ones(1), group_dst=0, group=group, tag=9)
    for work in works:
        work.wait()
    return []


def test_messages_by_tag_and_from_any_source(ranks: Any) -> None:
    assert ranks(3, by_tag)[0] == [[1.0] * 3, True, 1, [1, 2]]


def left_alone(world: Any) -> bool:
    """An operation that nobody waits for moves on while this rank computes, and its future is completed."""
    group = group_of(world)
    if world.rank == 1:
        time.sleep(0.2)
    tensor = torch.ones(3_000_000)
    future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    deadline = time.monotonic() + SECONDS
    while not future.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    return future.done() and torch.equal(future.value()[0], torch.full((3_000_000,), 2.0))


def test_nobody_has_to_wait(ranks: Any) -> None:
    assert ranks(2, left_alone) == [True, True]


def in_turn(world: Any) -> list[float]:
    """What a call gets that comes after one of several phases, which is on its way: rank 1 is late."""
    group, first, second = group_of(world), torch.ones(100_000), torch.full((3,), 5.0)
    time.sleep(0.05 * (world.rank == 1))
    work = dist.all_reduce(first, group=group, async_op=True)
    dist.all_reduce(second, group=group)
    assert work is not None
    work.wait()
    return [float(first.sum()), float(second.sum())]


def test_a_call_waits_for_those_before_it(ranks: Any) -> None:
    assert ranks(2, in_turn) == [[200_000.0, 30.0]] * 2


def noted(world: Any) -> list[Any]:
    """What is known of two calls, how far below `noted` they stand: one that has ended, and one that waits."""
    group, first = group_of(world), noted.__code__.co_firstlineno
    works = []
    dist.all_reduce(
        torch.ones(3),
        group=group,
    )
    if world.rank == 0:
        works += [dist.all_reduce(torch.ones(5).double(), group=group, async_op=True)]
    name = dist.distributed_c10d._world.pg_names[group]  # type: ignore[attr-defined]
    rows = [row for row in RECENT_CALLS.rows() if row[0] == name]
    dist.barrier()  # rank 1 has looked
    if world.rank == 1:
        works += [dist.all_reduce(torch.ones(5).double(), group=group, async_op=True)]
    for work in works:
        work.wait()
    return [[*row[1:6], row[8][1] - first, row[8][2]] for row in rows]


def test_what_is_known_of_calls(ranks: Any) -> None:
    """Of a call that has ended at once as of one that waits; the line is that of the call, not of its function."""
    ended = [1, "all_reduce", 3, "float32", True, 4, "noted"]
    waits = [2, "all_reduce", 5, "float64", False, 9, "noted"]
    assert ranks(2, noted) == [[ended, waits], [ended]]


def test_what_fails_at_once_breaks_its_lane() -> None:
    """Its error is raised in the call, and whoever waits for this rank is told; what waits is not overtaken."""
    told: list[str] = []

    def failing() -> Any:
        yield from ()
        raise RankFailedError("another call")

    queue = OperationQueue([0], 1.0, on_failure=lambda: told.append("failed"))
    with pytest.raises(RankFailedError, match="another call"):
        queue.try_finish(failing())
    assert told == ["failed"]
    assert not queue.try_finish(no_steps())
    with pytest.raises(RankFailedError, match="an earlier operation failed: another call"):
        ENGINE.start(PendingWork("shm all_reduce", queue, no_steps(), []))


def test_nothing_comes_between_what_has_begun_and_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that another thread starts in the same queue would run in the middle of these."""
    free: list[str] = []
    begun: list[str] = []

    class Lock:
        depth = 0

        def __enter__(self) -> None:
            self.depth += 1

        def __exit__(self, *_: object) -> None:
            self.depth -= 1
            if not self.depth and begun and not queue.operations:
                free.append("before it is in its queue")

    def later() -> Any:
        begun.append("here")
        while True:
            yield [1]

    monkeypatch.setattr(ENGINE, "lock", Lock())
    queue = OperationQueue([0, 1], 1.0)
    collectives: Any = SimpleNamespace(barrier=later)
    transport = Transport("shm", collectives, SimpleNamespace(queues=list), queue, lambda: None)  # type: ignore[arg-type]
    opts = dist.BarrierOptions()
    opts.asyncOp = False
    monkeypatch.setattr(ENGINE, "progress", lambda work, _: work)
    PythonGroup(transport, 0, 2, "of this test").barrier(opts)
    assert begun
    assert not free


def called_back(world: World, waits_by_work: bool) -> list[float]:
    """What callbacks get that start another collective and wait for its future, as torch's PowerSGD does.

    Each time rank 1 is late, so that the callback of rank 0 runs in the thread that moves on what was left; or where
    its work is waited for, in this one.
    """
    group, found = group_of(world, 5.0), []

    def summed(value: float) -> dist.Work:
        time.sleep(0.05 * (world.rank == 1))
        work = dist.all_reduce(torch.tensor([value]), group=group, async_op=True)
        assert work is not None
        return work

    def again(before: Any) -> Any:
        total = float(before.value()[0])
        found.append(total)
        return summed(total).get_future().wait()

    work = summed(float(world.rank + 1))
    future = work.get_future().then(again).then(again)
    if waits_by_work:
        work.wait()
    found.append(float(future.wait()[0]))
    return found


@pytest.mark.parametrize("waits_by_work", [False, True])
def test_callbacks_may_start_collectives_and_wait(ranks: Any, waits_by_work: bool) -> None:
    """Who waits for a future moves nothing on, and who calls back holds the engine's lock."""
    assert ranks(2, called_back, waits_by_work) == [[3.0, 6.0, 12.0]] * 2


# --- ranks that do something else, or nothing


def disagree(world: Any, what: str) -> str:
    group = group_of(world)
    own = torch.ones(8 if world.rank or what != "shape" else 9)
    try:
        if what == "operation" and world.rank == 0:
            dist.broadcast(own, group_src=0, group=group)
            dist.barrier(group=group)
        elif what == "message":
            if world.rank == 0:
                dist.send(own, group_dst=1, group=group)
            else:
                dist.recv(torch.ones(3), group_src=0, group=group)
        else:
            dist.all_reduce(own.double() if what == "dtype" and world.rank == 0 else own, group=group)
    except (RankFailedError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("operation", "all_reduce(8 elements of float32, sum"),
        ("shape", "all_reduce(9 elements of float32, sum"),
        ("dtype", "all_reduce(8 elements of float64, sum"),
        ("message", "rank 0 sent 32 bytes"),
    ],
)
def test_ranks_that_call_something_else_are_named(ranks: Any, what: str, says: str) -> None:
    begun = time.monotonic()
    assert any(says in words for words in ranks(2, disagree, what))
    assert time.monotonic() < begun + SECONDS / 2, "the other rank waited for the one that gave up"


def late(world: Any) -> str:
    group = group_of(world, seconds=0.5)
    if world.rank == 1:
        return ""
    try:
        dist.all_reduce(torch.ones(3), group=group)
    except RankFailedError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_does_not_come_is_named(ranks: Any) -> None:
    """Of three, one calls: the other two are named."""
    first, second, third = ranks(3, late)
    names = {0: first, 2: third}
    assert second == ""
    for rank, words in names.items():
        assert "shm all_reduce timed out after 0.5 s" in words, rank
        assert "1" in words.partition("rank")[2]


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


def killed_in(info: RankInfo, launch: Launch, name: str, folder: Path) -> None:
    """Rank 1 is killed by a timer in the middle of calls that never end; rank 0 writes what it was told, and when."""
    with open_world(info, launch) as world:
        group, tensor = group_of(world), torch.ones(1_000_000)
        OPERATIONS[name](tensor, group)
        if world.rank == 1:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        begun = time.monotonic()
        try:
            while time.monotonic() < begun + SECONDS:
                OPERATIONS[name](tensor, group)
        except RankFailedError as error:
            (folder / "told").write_text(f"{time.monotonic() - begun:.3f} {error}")
            raise


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_rank_killed_in_the_middle_is_named(tmp_path: Path, name: str) -> None:
    """By the others at once, long before the timeout; and nothing is left in shared memory."""
    launch = Launch(processes=2, timeout_seconds=SECONDS)
    with pytest.raises(RankFailedError, match="rank 1"):
        run_ranks(launch, killed_in, launch, name, tmp_path)
    if (tmp_path / "told").exists():  # the launcher may have ended it first
        seconds, _, words = (tmp_path / "told").read_text().partition(" ")
        assert float(seconds) < SECONDS / 2
        assert words.startswith("shm ")
        assert "rank 1 (process " in words
        assert words.endswith("has ended")
    assert not list(Path("/dev/shm").glob("*everyrank*"))


def raced(world: Any, rounds: int) -> int:
    """Messages that come while the engine's thread listens and this thread asks for the next: those that went wrong."""
    group, wrong = group_of(world), 0
    if world.rank == 1:
        for number in range(rounds):
            dist.send(torch.tensor([float(number)]), group_dst=0, group=group, tag=number % 3)
        dist.send(torch.zeros(1), group_dst=0, group=group, tag=99)
        return 0
    waiting = dist.irecv(torch.zeros(1), group_src=1, group=group, tag=99)  # keeps the thread listening
    for number in range(rounds):
        found = torch.full((1,), -1.0)
        dist.irecv(found, group_src=1, group=group, tag=number % 3).wait()
        wrong += float(found) != number
    waiting.wait()
    return wrong


def test_no_message_is_taken_between_looking_and_asking(ranks: Any) -> None:
    assert ranks(2, raced, 500) == [0, 0]


def test_a_receive_is_entered_under_the_lock() -> None:
    """The race above is too rare to be seen without it."""
    held: list[bool] = []

    class Messages:
        def receive(self, *_: Any) -> Any:
            held.append(ENGINE.lock._is_owned())  # type: ignore[attr-defined]
            return OperationQueue([0], 1.0), iter(())

        def queues(self) -> list[OperationQueue]:
            return []

    transport: Any = Transport("shm", None, Messages(), OperationQueue([0], 1.0), lambda: None)  # type: ignore[arg-type]
    with contextlib.suppress(Exception):
        PythonGroup(transport, 0, 1, "of this test").recv([torch.zeros(1)], 0, 0)
    assert held == [True]


def test_a_sender_that_is_ahead_fills_no_memory() -> None:
    """Of what is in the ring already a receive takes its own message, and none that comes after it."""
    words, cells = [0] * num_ring_words(2), torch.zeros(4, NUM_ENTRIES, 64, dtype=torch.uint8)
    sender, receiver = (
        Rings(rank, 2, (0, 1), words, 0, cells, lambda is_any: OperationQueue([0, 1], 1.0, from_any_source=is_any))
        for rank in (0, 1)
    )
    for number in range(4):
        assert list(sender.send(torch.full((20,), float(number)), 1, 7)[1]) == []
    for number in range(4):
        found = torch.zeros(20)
        assert list(receiver.receive(found, 0 if number % 2 else None, 7)[1]) == []
        assert found.tolist() == [number] * 20
        assert receiver.unexpected == []


def again(world: Any) -> list[Any]:
    """A receive that was given up takes nothing from the one after it, nor writes into its tensor."""
    group = group_of(world)
    if world.rank == 1:
        time.sleep(0.5)
        dist.send(torch.ones(3), group_dst=0, group=group, tag=1)
        return []
    given_up, found = torch.zeros(3), torch.zeros(3)
    try:
        dist.irecv(given_up, group_src=1, group=group, tag=1).wait(datetime.timedelta(seconds=0.1))
    except RankFailedError as error:
        words = str(error)
    dist.recv(found, group_src=1, group=group, tag=1)
    return [words, given_up.tolist(), found.tolist()]


def test_a_receive_that_timed_out_takes_no_message(ranks: Any) -> None:
    words, given_up, found = ranks(2, again)[0]
    assert "shm recv timed out after 0.1 s" in words
    assert (given_up, found) == ([0.0] * 3, [1.0] * 3)


def beside(world: Any) -> str:
    """A short time for one operation is none for what another group waits for."""
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


def test_a_timeout_is_of_one_operation(ranks: Any) -> None:
    assert ranks(2, beside)[0] == "[1.0, 1.0, 1.0]"


def failed_beside_the_thread(world: Any) -> int:
    """How many queues without any operation the thread still finds, after one that it had was given up."""
    group = group_of(world)
    if world.rank == 1:
        time.sleep(0.6)
        return 0
    with pytest.raises(RankFailedError, match="rank 1 did not come"):
        dist.all_reduce(torch.ones(3), group=group, async_op=True).wait(datetime.timedelta(seconds=0.2))  # type: ignore[union-attr]
    assert ENGINE.thread is not None
    return sum(not queue.operations for queue in ENGINE.pending_queues)


def test_a_call_that_timed_out_keeps_no_thread_awake(ranks: Any) -> None:
    assert ranks(2, failed_beside_the_thread)[0] == 0


def unequal(world: Any) -> str:
    group = group_of(world)
    sizes = [1, 2] if world.rank == 0 else [1, 1]
    try:
        dist.all_to_all_single(torch.zeros(2), torch.zeros(sum(sizes)), [1, 1], sizes, group=group)
        dist.barrier(group=group)
    except (RankFailedError, RuntimeError) as error:
        return str(error)
    return ""


def test_an_error_of_one_rank_reaches_the_others(ranks: Any) -> None:
    """Rank 1 expects another length than rank 0 sends; rank 0, which is right, does not wait for it."""
    begun = time.monotonic()
    first, second = ranks(2, unequal)
    assert all(part in second for part in ("rank 0 sends 8 bytes", "rank 1", "4"))
    assert "rank 1 has failed in this group" in first
    assert time.monotonic() < begun + SECONDS / 2


def wrong_at_the_call(world: Any) -> list[str]:
    """What this rank alone can see is said at the call, and the group goes on."""
    group, said = group_of(world), []
    for tensor, reduction in (
        (torch.ones(2), dist.ReduceOp.BAND),
        (torch.ones(2, dtype=torch.int64), dist.ReduceOp.AVG),
    ):
        try:
            dist.all_reduce(tensor, op=reduction, group=group)
        except RuntimeError as error:
            said.append(str(error))
    try:
        dist.all_gather_into_tensor(torch.zeros(2 * world.size + 1), torch.zeros(2), group=group)
    except (RuntimeError, ValueError) as error:
        said.append(type(error).__name__)
    odd = torch.arange(6.0)[::3][:1] + world.rank  # one element, of another stride
    whole = torch.arange(6.0).view(2, 3)[:1, 0]
    parts = [torch.empty(1) for _ in range(world.size)]
    dist.all_gather(parts, whole, group=group)
    dist.all_reduce(odd, group=group)
    return [*said, str(odd.tolist()), str([part.tolist() for part in parts])]


def test_what_a_call_gets_wrong_by_itself_breaks_no_group(ranks: Any) -> None:
    for band, avg, gather, odd, parts in ranks(2, wrong_at_the_call):
        assert "reduction band of torch.float32" in band
        assert "reduction avg of torch.int64" in avg
        assert gather in ("RuntimeError", "ValueError")
        assert (odd, parts) == ("[1.0]", "[[0.0], [0.0]]")


def test_slots_hold_every_dtype_for_any_number_of_ranks() -> None:
    """Whole pages; what is divided among the ranks of a group leaves each of them some."""
    for size in range(1, 257):
        buffer, entry = buffer_and_entry_bytes(size)
        assert buffer % 4096 == entry % 4096 == 0
        assert buffer // size >= 64
        assert entry > 0
    with pytest.raises(CannotRunError, match="too many"):
        buffer_and_entry_bytes(100_000)


def again_and_again(info: RankInfo, launch: Launch, rounds: int) -> int:
    """Elements that are wrong, over many rounds of many operations, with more ranks than cores."""
    with open_world(info, launch) as world:
        group, wrong = world.group, 0
        for number in range(rounds):
            length = 1 + (number * 7919) % 70_000
            tensor = torch.full((length,), float(world.rank + number))
            work = dist.all_reduce(tensor, group=group, async_op=True)
            own = torch.full((length,), world.rank)
            parts = [torch.empty_like(own) for _ in range(world.size)]
            dist.all_gather(parts, own, group=group)
            passed = torch.empty_like(own)
            works = [dist.isend(own, group_dst=(world.rank + 1) % world.size, group=group)]
            works += [dist.irecv(passed, group_src=(world.rank - 1) % world.size, group=group), work]
            for one in works:
                one.wait()
            right = sum(range(world.size)) + world.size * number
            wrong += int((tensor != right).sum()) + int((passed != (world.rank - 1) % world.size).sum())
            wrong += sum(int((part != rank).sum()) for rank, part in enumerate(parts))
        return wrong


@pytest.mark.usefixtures("python")
def test_more_ranks_than_cores() -> None:
    launch = Launch(processes=4, backend="shm", timeout_seconds=120.0)
    assert run_ranks(launch, again_and_again, launch, 50) == dict.fromkeys(range(4), 0)


# --- where there is none


@pytest.mark.parametrize("name", ["memfd_create", "pidfd_open"])
def test_a_system_call_that_is_refused_is_a_reason(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As by an old kernel, or a container."""

    def refuse_call(*_: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(segment.os, name, refuse_call)
    assert "rank 0 (PermissionError: Operation not permitted)" in no_shared_memory(dist.HashStore(), 0, 1, 1.0)


def test_a_group_of_a_name_that_was_there_before() -> None:
    store = dist.HashStore()
    for _ in range(2):
        memory, peers = segment.map_shared(store, 0, 1, [0], 4096, 5.0)
        assert memory[0] == 0
        memory[0] = 1
        memory.close()
        peers.close()


def test_a_machine_that_cannot_have_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    assert no_shared_memory(store, 0, 1, 1.0) == ""
    monkeypatch.setattr(segment.platform, "machine", lambda: "aarch64")
    assert "strong memory order" in no_shared_memory(store, 0, 1, 1.0)
    monkeypatch.setattr(segment.sys, "platform", "darwin")
    assert "needs Linux" in no_shared_memory(store, 0, 1, 1.0)


def in_another_namespace(info: RankInfo, launch: Launch) -> str:
    """Rank 1 finds nothing under the path of rank 0, as in a container of its own."""
    if info.rank == 1:
        segment.os.open = refuse  # type: ignore[assignment]
    with open_world(info, launch) as world:
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        return f"{world.choices['backend']} {tensor.tolist()}"


def refuse(*_: Any, **__: Any) -> int:
    raise FileNotFoundError(2, "No such file or directory")


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("asked", [None, "shm"])
def test_ranks_that_share_no_memory(asked: str | None) -> None:
    """gloo carries them where nothing was asked for, and shm by name is refused, whatever the launcher says."""
    launch = Launch(processes=2, backend=asked)
    if asked is None:
        found = run_ranks(launch, in_another_namespace, launch)
        assert found[0] == found[1]
        assert re.match(r"gloo: no memory .* rank 0 by rank 1 .*FileNotFoundError.* \[2\.0, 2\.0\]$", found[0])
    else:
        with pytest.raises(CannotRunError, match=r"--backend shm: .*use --backend gloo"):
            run_ranks(launch, in_another_namespace, launch)
