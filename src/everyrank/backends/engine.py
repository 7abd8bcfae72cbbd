"""Operations that wait for other ranks, moved on by whoever waits.

An operation is a generator: it does what it can, and yields the ranks that it waits for. So one thread can move many of
them on, and an operation of one group never keeps that of another from its end, in whatever order ranks start them:

    ENGINE.start(operation)   as far as it goes at once
    ENGINE.progress(operation)  to its end; what was called with async_op=True is left after a moment
    operation.wait()          this thread moves on all that is pending until this one is done
    a thread of the engine    moves on what was left, while nobody waits and this rank computes

Operations of one queue come one after the other: collectives of a group, messages to one rank.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import threading
import time
from typing import Any

import torch
from torch.autograd import profiler
from torch.distributed.distributed_c10d import Work
from torch.profiler import record_function

from everyrank.backends.operation_queue import OperationQueue, Steps, no_steps
from everyrank.errors import RankFailedError, describe

__all__ = ["DONE", "ENGINE", "Engine", "PendingWork", "recorded"]

_SPINS, _SPIN_SECONDS = 200, 0.0005  # looks at what is waited for alone, at most, before all else is moved on, too
_YIELD_SECONDS = 0.002  # of giving the core to others, before sleeping
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.00005, 0.001
# An asynchronous operation waits so long for its peers before it is left to the thread: that takes Python's lock from
# who computes, who then comes late to the next one, which is left to a thread of the others.
_GRACE_SECONDS = 0.01
_LOOK_SECONDS = 0.05  # from one look whether the others still live to the next
_THREAD_PAUSE = 0.0002  # of the thread, from one step of all that is pending to the next


class PendingWork(Work):
    """One call on its way: what torch gets back as its `Work`.

    name      for errors: "shm all_reduce"
    steps     what is to be done
    tensors   what it fills, for whoever asks its future
    """

    # of the class until they change: most calls are done before one of them does
    done = False
    error: BaseException | None = None
    value: Any = None
    future: torch.futures.Future[Any] | None = None
    missing: list[int] | None = None  # waited for
    is_awaited = False
    since = 0.0  # when that wait began
    looked = 0.0  # when the missing were last looked after

    def __init__(self, name: str, queue: OperationQueue, steps: Steps, tensors: list[Any]) -> None:
        super().__init__()
        self.name, self.queue, self.steps, self.tensors = name, queue, steps, tensors

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Until it is done. Raises what it failed with: `RankFailedError` for ranks that are gone or do not come."""
        if not self.done:
            if not self.is_awaited:
                self.is_awaited, self.since = True, time.monotonic()
            with recorded(*self.name.split()):
                ENGINE.finish(self, timeout.total_seconds() if timeout else None)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Whether it is done, after one more step of all that is pending."""
        with ENGINE.lock:
            ENGINE.move_all()
        return self.done

    def is_success(self) -> bool:
        """Whether it is done and has not failed."""
        return self.done and self.error is None

    def exception(self) -> Any:
        """What it failed with."""
        return self.error

    def result(self) -> list[torch.Tensor]:
        """The tensors that it fills."""
        return self.tensors

    def source_rank(self) -> int:
        """Of a receive that is done: the rank of the group that sent."""
        return int(self.value)

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Completed with the tensors when the operation is, or with its error."""
        with ENGINE.lock:
            if self.future is None:
                self.future = torch.futures.Future()
                if self.done:
                    self.future.set_result(None)
        # what a callback raises is an error in C++, too; DistributedDataParallel would take an exception for tensors
        return self.future.then(self._tensors_or_error)

    def _tensors_or_error(self, _: Any) -> list[Any]:
        if self.error is not None:
            raise self.error
        return self.tensors

    def end(self, error: BaseException | None) -> None:
        """Nothing is left to do. Under the engine's lock."""
        self.error, self.done = error, True
        self.steps.close()
        if self.future is not None:
            complete(self.future)


class Engine:
    """All that is pending in this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pending: dict[OperationQueue, None] = {}
        self.num_waiters = 0
        self.has_work = threading.Event()
        self.thread: threading.Thread | None = None
        # whether there are more ranks here than cores: who yields is given the core again before whom it waits for
        self.is_oversubscribed = False

    def start(self, operation: PendingWork) -> None:
        """Put it into its queue and move it on. Raises `RankFailedError` where one before it has failed."""
        queue = operation.queue
        with self.lock:
            if queue.broken is not None:
                raise RankFailedError(f"{operation.name}: one before it failed: {describe(queue.broken)}")
            queue.waiting.append(operation)
            self._move(queue)
            if not operation.done:
                self.pending[queue] = None

    def progress(self, operation: PendingWork, is_async: bool, grace: float = _GRACE_SECONDS) -> PendingWork:
        """Move on what has started: to its end or, asynchronous, for as long as its peers are there."""
        if operation.done:
            return operation
        # of messages, which nobody is patient with, a callback may start several that only end together
        if not is_async or (grace > 0 and is_called_back()):
            self.finish(operation, None)
        elif not (grace > 0 and self.finish(operation, None, grace)):
            self._leave_to_thread()
        return operation

    def finish(self, work: PendingWork, timeout_seconds: float | None, grace: float | None = None) -> bool:
        """Move on all that is pending until this one is done, or failed; with grace, for as long as its peers come.

        While a thread of the person waits here, that of the engine rests. Returns whether it is done.
        """
        with self.lock:
            self.num_waiters += 1
        try:
            return self._spin(work) or self._drive(work, grace, timeout_seconds)
        finally:
            with self.lock:
                self.num_waiters -= 1

    def forget(self, queue: OperationQueue) -> None:
        """The group of this queue has ended: nobody waits for it any more."""
        with self.lock:
            self.pending.pop(queue, None)
            queue.broken = RankFailedError("its process group has ended")
            while queue.waiting:
                queue.waiting.popleft().end(queue.broken)

    def _spin(self, work: PendingWork) -> bool:
        begun = time.monotonic()
        for _ in range(_SPINS):
            with self.lock:
                if not work.done:
                    self._move(work.queue)
            if work.done:
                return True
            os.sched_yield()  # there may be more ranks than cores
            if self.is_oversubscribed or time.monotonic() > begun + _SPIN_SECONDS:
                break
        return False

    def _drive(self, work: PendingWork, grace: float | None, timeout_seconds: float | None) -> bool:
        """Until it is done or, with grace, has waited that long for the same ranks. Whether it is done."""
        begun = time.monotonic()
        while not work.done:
            with self.lock:
                self.move_all()
                if work.done:
                    break
                now, head = time.monotonic(), work.queue.waiting[0]
                waited = now - head.since
                if grace is not None and waited >= grace:
                    break
                self._look_after_all()
                if timeout_seconds and now > begun + timeout_seconds and not work.done:
                    self._fail(work.queue, work.queue.late(head.name, head.missing or [], timeout_seconds))
            if waited < _YIELD_SECONDS and not self.is_oversubscribed:
                os.sched_yield()
            else:
                time.sleep(min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, waited / 20)))
        return work.done

    def move_all(self) -> None:
        """One step of all that is pending. Under the lock."""
        for queue in list(self.pending):
            self._move(queue)

    def _move(self, queue: OperationQueue) -> None:
        """As far as this queue goes. Under the lock."""
        waiting = queue.waiting
        while waiting:
            operation = waiting[0]
            try:
                missing = next(operation.steps)
            except StopIteration as end:
                operation.value = end.value
                waiting.popleft()
                operation.end(None)
            except BaseException as error:
                self._fail(queue, error)
                if not isinstance(error, Exception):
                    raise  # Ctrl-C
            else:
                if missing is not operation.missing:
                    operation.missing, operation.since = missing, time.monotonic()
                    operation.looked = operation.since
                return
        self.pending.pop(queue, None)

    def _look_after_all(self) -> None:
        """Who is waited for and is gone, or has not come in time, ends the wait."""
        now = time.monotonic()
        for queue in list(self.pending):
            head = queue.waiting[0] if queue.waiting else None
            if head is None or head.missing is None or now < head.looked + _LOOK_SECONDS:
                continue
            head.looked, missing = now, head.missing
            gone = queue.lost(missing) if queue.lost is not None else {}
            if gone:
                self._move(queue)  # what it said last may have come since
            if head.done or head.missing is not missing:
                continue
            gone = {rank: words for rank, words in gone.items() if rank in missing}
            if gone and (not queue.is_any_enough or len(gone) == len(missing)):
                self._fail(queue, RankFailedError(f"{head.name}: {', '.join(gone.values())}"))
            elif now > head.since + queue.timeout_seconds and (head.is_awaited or not queue.is_message):
                self._fail(queue, queue.late(head.name, missing, queue.timeout_seconds))

    def _fail(self, queue: OperationQueue, error: BaseException) -> None:
        """Nothing of this queue is pending any more, so that the thread may sleep. Under the lock."""
        queue.fail(error)
        self.pending.pop(queue, None)

    def _leave_to_thread(self) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, name="everyrank backends", daemon=True)
            self.thread.start()
            atexit.register(self._end_thread, self.thread)
        self.has_work.set()

    def _end_thread(self, thread: threading.Thread) -> None:
        self.thread = None  # where Python ends while it is inside torch, the process aborts
        self.has_work.set()
        thread.join(1.0)

    def _work(self) -> None:
        while self.thread is not None:
            queue = next(iter(list(self.pending)), None)
            first = queue.waiting[0] if queue is not None and queue.waiting else None
            if first is not None:
                with recorded(*first.name.split()):  # how long it was under way
                    self._work_on(first)
                continue
            self.has_work.clear()
            if not self.pending and self.thread is not None:
                self.has_work.wait()

    def _work_on(self, first: PendingWork) -> None:
        while self.thread is not None:
            if not self.num_waiters:
                with self.lock:
                    self.move_all()
                    self._look_after_all()
            if first.done:
                return
            time.sleep(_THREAD_PAUSE)


ENGINE = Engine()
DONE = PendingWork("", OperationQueue((), 0.0), no_steps(), [])
"""Of any synchronous call that has ended at once: torch waits for it, and asks it nothing else."""
DONE.done = True


# --- what a profiler sees of a call

_NOTHING = contextlib.nullcontext()


def recorded(backend: str, name: str) -> contextlib.AbstractContextManager[Any]:
    """Under a profiler, the span of a call: "shm:all_reduce"."""
    return record_function(f"{backend}:{name}") if profiler._is_profiler_enabled else _NOTHING  # pyright: ignore


# --- futures, completed under the engine's lock
#
# A callback may start a collective and wait for its future (torch's PowerSGD does). That wait moves nothing on, and its
# thread holds the lock: nobody else could either. So a collective is done when a callback has started it.

_THREAD = threading.local()


def is_called_back() -> bool:
    """Whether this thread is in a callback of a future."""
    return getattr(_THREAD, "is_inside", False)


def complete(future: torch.futures.Future[Any]) -> None:
    """Call back whoever waits for it, in this thread."""
    before, _THREAD.is_inside = is_called_back(), True
    try:
        future.set_result(None)
    finally:
        _THREAD.is_inside = before
