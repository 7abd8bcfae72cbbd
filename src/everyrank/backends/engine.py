"""ENGINE: runs the pending operations of all groups, in the thread that waits or in a background thread.

An operation is a generator that yields the ranks that it waits for, so one thread can run many operations. Operations
of different groups cannot deadlock, even if ranks start them in different orders.

    ENGINE.start(operation)            queues it, and runs the queue up to the next wait
    ENGINE.finish_or_leave(operation)  runs it to its end; with async_op=True only for a short grace time
    operation.wait()                   runs all pending operations in this thread until this one is done
    the engine's thread                runs the rest while no thread waits

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

__all__ = ["DONE", "ENGINE", "Engine", "PendingWork", "profiler_range"]

_MAX_SPINS, _MAX_SPIN_SECONDS = 200, 0.0005  # a wait spins on its own operation before it runs all pending ones
_YIELD_SECONDS = 0.002  # a wait calls sched_yield for this long before it sleeps
_MIN_SLEEP_SECONDS, _MAX_SLEEP_SECONDS = 0.00005, 0.001
# An asynchronous operation waits this long for its peers before the background thread takes over. The thread takes the
# GIL from the computation, which makes this rank late for the next collective.
_GRACE_SECONDS = 0.01
_CHECK_SECONDS = 0.05  # interval between two checks that the peers are still alive
_THREAD_SLEEP_SECONDS = 0.0002  # the background thread sleeps this long between two rounds


class PendingWork(Work):
    """The `Work` of one call.

    name      for errors and the profiler: "shm all_reduce"
    queue     the queue in which it runs
    steps     the generator of the operation
    tensors   its outputs, for `result` and `get_future`
    value     the value that the generator has returned; for a receive, the rank of the sender
    """

    # Class attributes save time, because most calls change only a few of them.
    done = False
    error: BaseException | None = None
    value: Any = None
    future: torch.futures.Future[Any] | None = None
    missing: list[int] | None = None  # the group ranks that it waits for
    is_awaited = False  # whether user code has called `wait`
    wait_start = 0.0
    last_check = 0.0  # time of the last check that the missing ranks are alive

    def __init__(self, name: str, queue: OperationQueue, steps: Steps, tensors: list[Any]) -> None:
        super().__init__()
        self.name, self.queue, self.steps, self.tensors = name, queue, steps, tensors

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait until it is done, or raise its error: `RankFailedError` if a rank has ended, or at the timeout."""
        if not self.done:
            if not self.is_awaited:
                self.is_awaited, self.wait_start = True, time.monotonic()
            with profiler_range(*self.name.split()):
                ENGINE.finish(self, timeout.total_seconds() if timeout else None)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Run all pending operations once, and return whether this one is done."""
        with ENGINE.lock:
            ENGINE.advance_all()
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
        # The callback raises the error. A future that holds the error as its value would give it to
        # DistributedDataParallel, which would use it as tensors.
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
    """Runs all pending operations of this process.

    lock             protects all queues and operations
    pending_queues   the queues with pending operations, the oldest first (a dict that is used as an ordered set)
    num_waiters      number of threads inside `finish`; the background thread pauses while there are any
    has_work         wakes the background thread
    thread           the background thread, started on the first need
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pending_queues: dict[OperationQueue, None] = {}
        self.num_waiters = 0
        self.has_work = threading.Event()
        self.thread: threading.Thread | None = None
        # With more ranks than cores, sched_yield may return before the awaited rank has run, so waits sleep instead.
        self.is_oversubscribed = False

    def start(self, operation: PendingWork) -> None:
        """Put an operation into its queue, and run the queue up to its next wait.

        Raises `RankFailedError` if an earlier operation of the queue has failed.
        """
        queue = operation.queue
        with self.lock:
            if queue.error is not None:
                raise RankFailedError(f"{operation.name}: an earlier operation failed: {describe(queue.error)}")
            queue.operations.append(operation)
            self._advance(queue)
            if not operation.done:
                self.pending_queues[queue] = None

    def finish_or_leave(
        self, operation: PendingWork, is_async: bool, grace_seconds: float = _GRACE_SECONDS
    ) -> PendingWork:
        """Run a started operation to its end, and return it.

        An asynchronous one is left to the background thread if its peers do not arrive within `grace_seconds`.
        """
        if operation.done:
            return operation
        # Only messages have a grace time of 0. A callback must not wait for one message, because the callback may start
        # several messages that complete only together.
        if not is_async or (grace_seconds > 0 and is_in_callback()):
            self.finish(operation, None)
        elif not (grace_seconds > 0 and self.finish(operation, None, grace_seconds)):
            self._leave_to_thread()
        return operation

    def finish(self, operation: PendingWork, timeout_seconds: float | None, grace_seconds: float | None = None) -> bool:
        """Run all pending operations until this one is done or has failed, and return whether it has ended.

        With `grace_seconds`, stop if the first operation of its queue waits that long for the same ranks. Meanwhile the
        background thread pauses.
        """
        with self.lock:
            self.num_waiters += 1
        try:
            return self._spin(operation) or self._run_and_sleep(operation, grace_seconds, timeout_seconds)
        finally:
            with self.lock:
                self.num_waiters -= 1

    def abort_queue(self, queue: OperationQueue) -> None:
        """Fail all operations in the queue of a destroyed group."""
        with self.lock:
            self.pending_queues.pop(queue, None)
            queue.error = RankFailedError("the process group was destroyed")
            while queue.operations:
                queue.operations.popleft().end(queue.error)

    def _spin(self, operation: PendingWork) -> bool:
        """Run this operation without sleeping, for a short time only; return whether it is done."""
        start = time.monotonic()
        for _ in range(_MAX_SPINS):
            with self.lock:
                if not operation.done:
                    self._advance(operation.queue)
            if operation.done:
                return True
            os.sched_yield()  # let another rank run on this core
            if self.is_oversubscribed or time.monotonic() > start + _MAX_SPIN_SECONDS:
                break
        return False

    def _run_and_sleep(
        self, operation: PendingWork, grace_seconds: float | None, timeout_seconds: float | None
    ) -> bool:
        """Run all pending operations, with growing pauses, until this one is done; return whether it is.

        With `grace_seconds`, stop if the first operation of its queue waits that long for the same ranks.
        """
        start = time.monotonic()
        while not operation.done:
            with self.lock:
                self.advance_all()
                if operation.done:
                    break
                now, head = time.monotonic(), operation.queue.operations[0]
                waited_seconds = now - head.wait_start
                if grace_seconds is not None and waited_seconds >= grace_seconds:
                    break
                self._fail_overdue()
                if timeout_seconds and now > start + timeout_seconds and not operation.done:
                    error = operation.queue.timeout_error(head.name, head.missing or [], timeout_seconds)
                    self._fail(operation.queue, error)
            if waited_seconds < _YIELD_SECONDS and not self.is_oversubscribed:
                os.sched_yield()
            else:
                time.sleep(min(_MAX_SLEEP_SECONDS, max(_MIN_SLEEP_SECONDS, waited_seconds / 20)))
        return operation.done

    def advance_all(self) -> None:
        """Run all pending operations up to their next waits. Needs the lock."""
        for queue in list(self.pending_queues):
            self._advance(queue)

    def _advance(self, queue: OperationQueue) -> None:
        """Run the operations of this queue up to the next wait. Needs the lock."""
        operations = queue.operations
        while operations:
            operation = operations[0]
            try:
                missing = next(operation.steps)
            except StopIteration as end:
                operation.value = end.value
                operations.popleft()
                operation.end(None)
            except BaseException as error:
                self._fail(queue, error)
                if not isinstance(error, Exception):
                    raise  # Ctrl-C
            else:
                if missing is not operation.missing:
                    operation.missing, operation.wait_start = missing, time.monotonic()
                    operation.last_check = operation.wait_start
                return
        self.pending_queues.pop(queue, None)

    def _fail_overdue(self) -> None:
        """Fail operations that wait for a rank that has ended, or that have timed out. Needs the lock."""
        now = time.monotonic()
        for queue in list(self.pending_queues):
            head = queue.operations[0] if queue.operations else None
            if head is None or head.missing is None or now < head.last_check + _CHECK_SECONDS:
                continue
            head.last_check, missing = now, head.missing
            lost = queue.find_lost(missing) if queue.find_lost is not None else {}
            if lost:
                self._advance(queue)  # data that a lost rank sent before its end may have arrived since
            if head.done or head.missing is not missing:
                continue
            lost = {rank: reason for rank, reason in lost.items() if rank in missing}
            if lost and (not queue.from_any_source or len(lost) == len(missing)):
                self._fail(queue, RankFailedError(f"{head.name}: {', '.join(lost.values())}"))
            elif now > head.wait_start + queue.timeout_seconds and (head.is_awaited or not queue.is_message):
                self._fail(queue, queue.timeout_error(head.name, missing, queue.timeout_seconds))

    def _fail(self, queue: OperationQueue, error: BaseException) -> None:
        """Fail all operations of this queue. Needs the lock."""
        queue.fail(error)
        self.pending_queues.pop(queue, None)

    def _leave_to_thread(self) -> None:
        """Wake the background thread, and start it on the first call."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._run_thread, name="everyrank backends", daemon=True)
            self.thread.start()
            atexit.register(self._end_thread, self.thread)
        self.has_work.set()

    def _end_thread(self, thread: threading.Thread) -> None:
        """End the background thread at exit: if Python ended while it is inside torch, the process would abort."""
        self.thread = None
        self.has_work.set()
        thread.join(1.0)

    def _run_thread(self) -> None:
        while self.thread is not None:
            with self.lock:
                queue = next(iter(self.pending_queues), None)
                operation = queue.operations[0] if queue is not None and queue.operations else None
            if operation is not None:
                with profiler_range(*operation.name.split()):
                    self._run_in_thread_until(operation)
                continue
            self.has_work.clear()
            if not self.pending_queues and self.thread is not None:
                self.has_work.wait()

    def _run_in_thread_until(self, operation: PendingWork) -> None:
        """Run all pending operations until this one is done, except while another thread runs them."""
        while self.thread is not None:
            if not self.num_waiters:
                with self.lock:
                    self.advance_all()
                    self._fail_overdue()
            if operation.done:
                return
            time.sleep(_THREAD_SLEEP_SECONDS)


ENGINE = Engine()
DONE = PendingWork("", OperationQueue((), 0.0), no_steps(), [])
"""The shared `Work` of all synchronous calls that need no wait. Sharing is safe, because torch only calls `wait`."""
DONE.done = True


# --- profiler ranges

_NO_RANGE = contextlib.nullcontext()


def profiler_range(backend: str, name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that records a profiler range, for example "shm:all_reduce"."""
    return record_function(f"{backend}:{name}") if profiler._is_profiler_enabled else _NO_RANGE  # pyright: ignore


# --- futures, completed under the engine's lock
#
# A callback may start a collective and wait for its future, as torch's PowerSGD hook does. Waiting for a future runs no
# operation. The callback's thread holds the lock, so no other thread can run one either. Therefore, in a callback,
# `finish_or_leave` does not leave an asynchronous collective to the thread, but finishes it.

_THREAD_LOCAL = threading.local()


def is_in_callback() -> bool:
    """Return whether this thread is in a callback of a future."""
    return getattr(_THREAD_LOCAL, "is_in_callback", False)


def complete(future: torch.futures.Future[Any]) -> None:
    """Complete a future; its callbacks run in this thread."""
    was_in_callback, _THREAD_LOCAL.is_in_callback = is_in_callback(), True
    try:
        future.set_result(None)
    finally:
        _THREAD_LOCAL.is_in_callback = was_in_callback
