"""ENGINE: runs the pending operations of all groups, in the thread that waits or in a background thread.

An operation is a generator that yields the ranks that it waits for. One thread can therefore run many of them, and
operations of different groups cannot deadlock, in whatever order the ranks start them:

    ENGINE.start(operation)     runs it up to its first wait
    ENGINE.progress(operation)  runs it to its end; with async_op=True only for a short grace time
    operation.wait()            runs all pending operations in this thread until this one is done
    the engine's thread         runs the rest while no thread waits

Operations of one queue run one after the other: the collectives of a group, or the messages to one rank.
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

_SPINS, _SPIN_SECONDS = 200, 0.0005  # longest spin on one operation before all pending ones run
_YIELD_SECONDS = 0.002  # of sched_yield before sleeping
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.00005, 0.001
# An asynchronous operation waits this long for its peers before the background thread takes over. The thread takes the
# GIL from the computation, which makes this rank late for the next collective.
_GRACE_SECONDS = 0.01
_CHECK_SECONDS = 0.05  # between two checks whether the peers still live
_THREAD_PAUSE = 0.0002  # pause of the background thread between two rounds


class PendingWork(Work):
    """The `Work` of one call.

    name      for errors: "shm all_reduce"
    steps     the generator of the operation
    tensors   its outputs, for `result` and `get_future`
    """

    # class attributes, which save time: most calls end before one of them changes
    done = False
    error: BaseException | None = None
    value: Any = None
    future: torch.futures.Future[Any] | None = None
    missing: list[int] | None = None  # the ranks that it waits for
    is_awaited = False
    since = 0.0  # when this wait began
    checked = 0.0  # when the missing ranks were last checked

    def __init__(self, name: str, queue: OperationQueue, steps: Steps, tensors: list[Any]) -> None:
        super().__init__()
        self.name, self.queue, self.steps, self.tensors = name, queue, steps, tensors

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait until it is done. Raises its error: `RankFailedError` for ranks that have ended or time out."""
        if not self.done:
            if not self.is_awaited:
                self.is_awaited, self.since = True, time.monotonic()
            with recorded(*self.name.split()):
                ENGINE.finish(self, timeout.total_seconds() if timeout else None)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Run all pending operations once, and return whether this one is done."""
        with ENGINE.lock:
            ENGINE.move_all()
        return self.done

    def is_success(self) -> bool:
        """Return whether it is done without an error."""
        return self.done and self.error is None

    def exception(self) -> Any:
        """Return its error."""
        return self.error

    def result(self) -> list[torch.Tensor]:
        """Return its output tensors."""
        return self.tensors

    def source_rank(self) -> int:
        """Return the sender's rank in the group, for a completed receive."""
        return int(self.value)

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the output tensors, or of the error."""
        with ENGINE.lock:
            if self.future is None:
                self.future = torch.futures.Future()
                if self.done:
                    self.future.set_result(None)
        # the callback raises the error, because DistributedDataParallel would take an exception object for tensors
        return self.future.then(self._tensors_or_error)

    def _tensors_or_error(self, _: Any) -> list[Any]:
        if self.error is not None:
            raise self.error
        return self.tensors

    def end(self, error: BaseException | None) -> None:
        """Mark it as done, with or without an error. Needs the engine's lock."""
        self.error, self.done = error, True
        self.steps.close()
        if self.future is not None:
            complete(self.future)


class Engine:
    """Runs all pending operations of this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pending: dict[OperationQueue, None] = {}
        self.num_waiters = 0
        self.has_work = threading.Event()
        self.thread: threading.Thread | None = None
        # more ranks than cores: sched_yield may return before the awaited rank has run, so waits sleep instead
        self.is_oversubscribed = False

    def start(self, operation: PendingWork) -> None:
        """Put it into its queue and run it. Raises `RankFailedError` if an earlier one has failed."""
        queue = operation.queue
        with self.lock:
            if queue.broken is not None:
                raise RankFailedError(f"{operation.name}: one before it failed: {describe(queue.broken)}")
            queue.waiting.append(operation)
            self._move(queue)
            if not operation.done:
                self.pending[queue] = None

    def progress(self, operation: PendingWork, is_async: bool, grace: float = _GRACE_SECONDS) -> PendingWork:
        """Run a started operation: to its end or, if asynchronous, while its peers arrive within `grace` seconds."""
        if operation.done:
            return operation
        # not for messages (grace 0): a callback may start several, which only complete together
        if not is_async or (grace > 0 and is_in_callback()):
            self.finish(operation, None)
        elif not (grace > 0 and self.finish(operation, None, grace)):
            self._leave_to_thread()
        return operation

    def finish(self, work: PendingWork, timeout_seconds: float | None, grace: float | None = None) -> bool:
        """Run all pending operations until this one is done or failed; with `grace`, while its peers arrive in time.

        The background thread pauses meanwhile. Returns whether it is done.
        """
        with self.lock:
            self.num_waiters += 1
        try:
            return self._spin(work) or self._drive(work, grace, timeout_seconds)
        finally:
            with self.lock:
                self.num_waiters -= 1

    def forget(self, queue: OperationQueue) -> None:
        """Fail everything in the queue of a destroyed group."""
        with self.lock:
            self.pending.pop(queue, None)
            queue.broken = RankFailedError("its process group has ended")
            while queue.waiting:
                queue.waiting.popleft().end(queue.broken)

    def _spin(self, work: PendingWork) -> bool:
        start = time.monotonic()
        for _ in range(_SPINS):
            with self.lock:
                if not work.done:
                    self._move(work.queue)
            if work.done:
                return True
            os.sched_yield()  # there may be more ranks than cores
            if self.is_oversubscribed or time.monotonic() > start + _SPIN_SECONDS:
                break
        return False

    def _drive(self, work: PendingWork, grace: float | None, timeout_seconds: float | None) -> bool:
        """Run until it is done or, with `grace`, has waited that long for the same ranks; return whether it is done."""
        start = time.monotonic()
        while not work.done:
            with self.lock:
                self.move_all()
                if work.done:
                    break
                now, head = time.monotonic(), work.queue.waiting[0]
                waited = now - head.since
                if grace is not None and waited >= grace:
                    break
                self._fail_overdue()
                if timeout_seconds and now > start + timeout_seconds and not work.done:
                    self._fail(work.queue, work.queue.late(head.name, head.missing or [], timeout_seconds))
            if waited < _YIELD_SECONDS and not self.is_oversubscribed:
                os.sched_yield()
            else:
                time.sleep(min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, waited / 20)))
        return work.done

    def move_all(self) -> None:
        """Run all pending operations once. Needs the lock."""
        for queue in list(self.pending):
            self._move(queue)

    def _move(self, queue: OperationQueue) -> None:
        """Run the operations of this queue up to the next wait. Needs the lock."""
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
                    operation.checked = operation.since
                return
        self.pending.pop(queue, None)

    def _fail_overdue(self) -> None:
        """Fail operations that wait for a rank that has ended or timed out."""
        now = time.monotonic()
        for queue in list(self.pending):
            head = queue.waiting[0] if queue.waiting else None
            if head is None or head.missing is None or now < head.checked + _CHECK_SECONDS:
                continue
            head.checked, missing = now, head.missing
            gone = queue.lost(missing) if queue.lost is not None else {}
            if gone:
                self._move(queue)  # its last data may have arrived since
            if head.done or head.missing is not missing:
                continue
            gone = {rank: reason for rank, reason in gone.items() if rank in missing}
            if gone and (not queue.is_any_enough or len(gone) == len(missing)):
                self._fail(queue, RankFailedError(f"{head.name}: {', '.join(gone.values())}"))
            elif now > head.since + queue.timeout_seconds and (head.is_awaited or not queue.is_message):
                self._fail(queue, queue.late(head.name, missing, queue.timeout_seconds))

    def _fail(self, queue: OperationQueue, error: BaseException) -> None:
        """Fail all operations of this queue. Needs the lock."""
        queue.fail(error)
        self.pending.pop(queue, None)

    def _leave_to_thread(self) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._run_thread, name="everyrank backends", daemon=True)
            self.thread.start()
            atexit.register(self._end_thread, self.thread)
        self.has_work.set()

    def _end_thread(self, thread: threading.Thread) -> None:
        self.thread = None  # the process would abort if Python ended while the thread is inside torch
        self.has_work.set()
        thread.join(1.0)

    def _run_thread(self) -> None:
        while self.thread is not None:
            queue = next(iter(list(self.pending)), None)
            first = queue.waiting[0] if queue is not None and queue.waiting else None
            if first is not None:
                with recorded(*first.name.split()):  # the profiler range of the operation
                    self._run_until_done(first)
                continue
            self.has_work.clear()
            if not self.pending and self.thread is not None:
                self.has_work.wait()

    def _run_until_done(self, first: PendingWork) -> None:
        while self.thread is not None:
            if not self.num_waiters:
                with self.lock:
                    self.move_all()
                    self._fail_overdue()
            if first.done:
                return
            time.sleep(_THREAD_PAUSE)


ENGINE = Engine()
DONE = PendingWork("", OperationQueue((), 0.0), no_steps(), [])
"""The shared work of synchronous calls that ended at once: torch only calls its `wait`."""
DONE.done = True


# --- profiler ranges

_NOTHING = contextlib.nullcontext()


def recorded(backend: str, name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a profiler range for a call, for example "shm:all_reduce"."""
    return record_function(f"{backend}:{name}") if profiler._is_profiler_enabled else _NOTHING  # pyright: ignore


# --- futures, completed under the engine's lock
#
# A callback may start a collective and wait for its future, as torch's PowerSGD hook does. That wait runs no operation,
# and its thread holds the lock, so no other thread can. So a collective that a callback starts runs to its end at once.

_THREAD = threading.local()


def is_in_callback() -> bool:
    """Return whether this thread is in a callback of a future."""
    return getattr(_THREAD, "is_inside", False)


def complete(future: torch.futures.Future[Any]) -> None:
    """Complete a future; its callbacks run in this thread."""
    before, _THREAD.is_inside = is_in_callback(), True
    try:
        future.set_result(None)
    finally:
        _THREAD.is_inside = before
