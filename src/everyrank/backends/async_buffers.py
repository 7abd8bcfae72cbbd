"""Buffers of asynchronous collectives, filled with NaN until somebody waits for them.

`work = dist.all_reduce(tensor, async_op=True)` returns before `tensor` has its result. Code that reads the tensor
before `work.wait()` computes with whatever is there: often the right numbers, because small collectives on one machine
end at once. Inside `nan_until_wait` the collective fills a private copy. The user's buffer holds NaN, and gets the
result in `wait()`, in `is_completed()` once that is true, or in the future's callbacks.

    with nan_until_wait() as calls:
        train()
    calls.places    {"my_parallel.py:25 in backward": "all_to_all_single"}

Calls of torch's own Python code (DistributedDataParallel, fully_shard, DTensor, functional collectives) and of
everyrank are left as they are: those wait through streams, events and futures of their own. So are buffers of
integers, which have no NaN. Works with every backend: what is replaced are the functions of torch.distributed, also
where user code has imported them by name before.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Work

from everyrank.errors import is_user_code

__all__ = ["AsyncCalls", "DelayedWork", "active_async_calls", "nan_until_wait"]

# function of torch.distributed -> the argument that it fills, and whether it reads that, too
_FILLED = {
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "reduce": "tensor",
    "all_reduce_coalesced": "tensors",
    "all_gather": "tensor_list",
    "all_gather_single": "output_tensor",
    "all_gather_into_tensor": "output_tensor",
    "all_gather_coalesced": "output_tensor_lists",
    "gather": "gather_list",
    "scatter": "tensor",
    "reduce_scatter": "output",
    "reduce_scatter_single": "output",
    "reduce_scatter_tensor": "output",
    "all_to_all": "output_tensor_list",
    "all_to_all_single": "output",
    "irecv": "tensor",
}
_KEPT = 256  # works that were started and not waited for
_LIBRARIES = ("torch", "everyrank")
_PASSED_THROUGH = ("torch.distributed.c10d_logger", "contextlib", "functools")  # between a caller and the function


@dataclass
class AsyncCalls:
    """The asynchronous calls of user code inside `nan_until_wait`.

    places   "file.py:25 in function" -> the name of the collective, for each line that has called one
    only     lines whose buffers are filled with NaN; None: all
    """

    places: dict[str, str] = field(default_factory=dict[str, str])
    only: frozenset[str] | None = None
    pending: list[DelayedWork] = field(default_factory=list["DelayedWork"], repr=False)

    def fills(self, location: str, operation: str) -> bool:
        """Note a call; whether its buffers are to be filled with NaN."""
        self.places.setdefault(location, operation)
        return self.only is None or location in self.only

    @contextlib.contextmanager
    def limited_to(self, *places: str) -> Generator[None]:
        """Fill only the buffers of calls from these lines."""
        before, self.only = self.only, frozenset(places)
        try:
            yield
        finally:
            self.only = before


class DelayedWork(Work):
    """The `Work` of a collective that fills private copies: the user's tensors get the result when they are waited for.

    pairs   (the user's tensor, the private copy that the collective fills)
    """

    def __init__(self, work: Any, pairs: Sequence[tuple[Tensor, Tensor]], others: Sequence[Any] = ()) -> None:
        super().__init__()
        self.work, self.pairs, self.others = work, list(pairs), others
        self.filled = {private.data_ptr(): tensor for tensor, private in pairs}
        self.is_delivered, self.lock = False, threading.Lock()

    def deliver(self) -> None:
        """Copy the result into the user's tensors, once. Only after the collective is done, or waited for."""
        with self.lock:
            if self.is_delivered:
                return
            for tensor, private in self.pairs:
                tensor.data.copy_(private)  # autograd must not count this as a change of its own
            self.is_delivered, self.pairs = True, []

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Wait for the collective, then deliver its result."""
        done = self.work.wait(*args, **kwargs)
        self.deliver()
        return bool(done)

    def synchronize(self) -> None:
        """Make the current stream wait, then deliver the result on it."""
        self.work.synchronize()
        self.deliver()

    def block_current_stream(self) -> None:
        """The same, without blocking the CPU."""
        self.work.block_current_stream()
        self.deliver()

    def is_completed(self) -> bool:
        """Whether the collective is done; delivers its result where it is."""
        done = bool(self.work.is_completed())
        if done:
            self.deliver()
        return done

    def is_success(self) -> bool:
        """Whether it is done and has not failed."""
        return bool(self.work.is_success())

    def exception(self) -> Any:
        """What it failed with."""
        return self.work.exception()

    def result(self) -> Any:
        """The tensors that it fills."""
        self.is_completed()
        return self._of_the_user(self.work.result())

    def source_rank(self) -> int:
        """Of a receive that is done: the rank that sent."""
        return int(self.work.source_rank())

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A future of the user's tensors: they have the result before any callback runs."""

        def delivered(future: Any) -> Any:
            value = future.value()
            self.deliver()
            return self._of_the_user(value)

        return self.work.get_future().then(delivered)

    def _of_the_user(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.filled.get(value.data_ptr(), value)
        if isinstance(value, list | tuple):
            return type(value)(self._of_the_user(item) for item in value)  # pyright: ignore[reportCallIssue]
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


_ACTIVE: list[AsyncCalls] = []


def active_async_calls() -> AsyncCalls | None:
    """The calls of the innermost `nan_until_wait` that this process is inside of; None outside."""
    return _ACTIVE[-1] if _ACTIVE else None


@contextlib.contextmanager
def nan_until_wait() -> Generator[AsyncCalls]:
    """Fill the output buffers of `async_op=True` collectives, and of `irecv`, with NaN until they are waited for.

    Yields the calls that user code makes meanwhile. Inside of another `nan_until_wait` its calls are yielded.

        with nan_until_wait():
            work = dist.all_reduce(tensor, async_op=True)
            tensor.sum()        # nan
            work.wait()
            tensor.sum()        # the result
    """
    if _ACTIVE:
        yield _ACTIVE[-1]
        return
    calls = AsyncCalls()
    undo: list[Callable[[], None]] = []
    for name in (*_FILLED, "batch_isend_irecv"):
        function = getattr(dist, name, None) or getattr(dist.distributed_c10d, name, None)
        if function is not None:
            undo.append(_replaced(name, function, calls))
    if torch.cuda.is_available():
        undo.append(_replaced_in(torch.cuda, "synchronize", functools.partial(_synchronized, calls)))
    _ACTIVE.append(calls)
    try:
        yield calls
    finally:
        _ACTIVE.remove(calls)
        for put_back in undo:
            put_back()


def _replaced(name: str, function: Any, calls: AsyncCalls) -> Callable[[], None]:
    """Put the delayed function in place of torch's; what puts that back.

    torch's own decorator keeps the function in a cell: with another one there, also the names that user code has
    imported before call it. Where a torch has no such decorator, its modules get another function.
    """
    inner = getattr(function, "__wrapped__", None)
    make = _batch if name == "batch_isend_irecv" else functools.partial(_collective, name)
    for cell in getattr(function, "__closure__", None) or ():
        if inner is not None and cell.cell_contents is inner:
            cell.cell_contents = make(inner, calls)
            return functools.partial(setattr, cell, "cell_contents", inner)
    delayed = functools.wraps(function)(make(function, calls))
    undo = [
        _replaced_in(module, name, lambda _, delayed=delayed: delayed)
        for module in (dist, dist.distributed_c10d)
        if getattr(module, name, None) is function
    ]

    def put_all_back() -> None:
        for put_back in undo:
            put_back()

    return put_all_back


def _replaced_in(module: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    before = getattr(module, name)
    setattr(module, name, make(before))
    return functools.partial(setattr, module, name, before)


def _synchronized(calls: AsyncCalls, synchronize: Any) -> Any:
    """torch.cuda.synchronize: afterwards every collective that was enqueued is done."""

    @functools.wraps(synchronize)
    def synchronized(*args: Any, **kwargs: Any) -> Any:
        out = synchronize(*args, **kwargs)
        calls.pending = [work for work in calls.pending if not work.is_completed()]
        return out

    return synchronized


def _caller() -> str | None:
    """The line of user code that calls a collective, "file.py:25 in function"; None where a library calls it."""
    frame: Any = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_PASSED_THROUGH):
        frame = frame.f_back
    if frame is None or str(frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES:
        return None
    first = frame
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or first
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _collective(name: str, inner: Callable[..., Any], calls: AsyncCalls) -> Callable[..., Any]:
    """The function that runs an asynchronous call on private copies."""
    signature = inspect.signature(inner)

    def delayed(*args: Any, **kwargs: Any) -> Any:
        is_async = name == "irecv" or kwargs.get("async_op") or (len(args) > 2 and any(a is True for a in args))
        location = _caller() if is_async else None
        if location is None:
            return inner(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        filled = list(_tensors(given.get(_FILLED[name])))
        if not (name == "irecv" or given.get("async_op")) or not _can_delay(filled, given.get("group")):
            return inner(*args, **kwargs)
        if not calls.fills(location, name):
            return inner(*args, **kwargs)
        pairs = [(tensor, _private(tensor)) for tensor in filled]
        _put_in(bound.arguments, _FILLED[name], pairs)
        work = inner(*bound.args, **bound.kwargs)
        if work is None:  # this rank is not in the group
            return None
        return _delayed(work, pairs, calls, is_read=_is_only_read(name, given))

    return delayed


def _delayed(work: Any, pairs: list[tuple[Tensor, Tensor]], calls: AsyncCalls, is_read: bool = False) -> DelayedWork:
    delayed = DelayedWork(work, pairs)
    if not is_read:
        for tensor, _ in pairs:
            tensor.data.fill_(float("nan"))
    if torch.cuda.is_available():
        calls.pending = [
            *(work_before for work_before in calls.pending[-_KEPT:] if not work_before.is_delivered),
            delayed,
        ]
    return delayed


def _batch(inner: Callable[..., Any], calls: AsyncCalls) -> Callable[..., Any]:
    """`batch_isend_irecv` whose receives fill private copies."""

    def delayed(p2p_op_list: Sequence[Any]) -> Any:
        location = _caller()
        receives = [op for op in p2p_op_list if getattr(op.op, "__name__", "") == "irecv"]
        tensors = [op.tensor for op in receives]
        if location is None or not _can_delay(tensors, None) or not calls.fills(location, "batch_isend_irecv"):
            return inner(p2p_op_list)
        private = {id(op): (op.tensor, _private(op.tensor)) for op in receives}
        ops = [
            dist.P2POp(op.op, private[id(op)][1], group=op.group, tag=op.tag, group_peer=op.group_peer)
            if id(op) in private
            else op
            for op in p2p_op_list
        ]
        works = inner(ops)
        if len(works) == len(ops):
            of_each = [[private[id(op)]] if id(op) in private else [] for op in p2p_op_list]
        else:  # one for all of them
            of_each = [list(private.values())] + [[] for _ in works[1:]]
        return [_delayed(work, pairs, calls) if pairs else work for work, pairs in zip(works, of_each, strict=True)]

    return delayed


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif value is not None:
        yield value


def _can_delay(filled: Sequence[Any], group: Any) -> bool:
    """Whether these are plain tensors that can hold NaN, outside of a coalescing manager, whose calls have no work."""
    coalescing: Any = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_coalesce_state", {})
    default = dist.group.WORLD
    if (group or default) in coalescing:
        return False
    return bool(filled) and all(
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and (tensor.is_floating_point() or tensor.is_complex())
        and not any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        for tensor in filled
    )


def _private(tensor: Tensor) -> Tensor:
    """A copy that lies in memory as the tensor does: a backend that refuses its strides still refuses them."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach())


def _put_in(arguments: dict[str, Any], name: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Replace the filled tensors by their copies; what is read and shares their memory is copied, too."""
    private = {id(tensor): copy for tensor, copy in pairs}
    storages = {tensor.untyped_storage().data_ptr() for tensor, _ in pairs}

    def swapped(value: Any, is_filled: bool) -> Any:
        if isinstance(value, list | tuple):
            return [swapped(item, is_filled) for item in value]
        if not isinstance(value, Tensor):
            return value
        if is_filled:
            return private[id(value)]
        is_shared = type(value) in (Tensor, nn.Parameter) and value.untyped_storage().data_ptr() in storages
        return value.detach().clone() if is_shared else value

    for key, value in list(arguments.items()):
        if key == name or isinstance(value, Tensor | list | tuple):
            arguments[key] = swapped(value, key == name)


def _is_only_read(name: str, given: dict[str, Any]) -> bool:
    """Whether this rank's buffer keeps its own numbers: that of the rank that broadcasts, or sends to be reduced."""
    if name not in ("broadcast", "reduce"):
        return False
    group: Any = given.get("group") or dist.group.WORLD
    role = "src" if name == "broadcast" else "dst"
    root = given.get(f"group_{role}")
    if root is None:
        root = dist.get_group_rank(group, given[role]) if group is not dist.group.WORLD else given[role]
    return (dist.get_rank(group) == root) == (name == "broadcast")
