"""nan_until_wait: fills the output buffers of asynchronous collectives with NaN until user code waits for them.

`work = dist.all_reduce(tensor, async_op=True)` returns before `tensor` has its result. Code that reads the tensor
before `work.wait()` uses whatever is there. That is often the right result, because small collectives on one machine
end at once. Inside `nan_until_wait` the collective fills a private copy. The user's buffer holds NaN. It gets the
result in `wait()`, in `is_completed()` once that is true, or before the future's callbacks run.

    with nan_until_wait() as calls:
        train()
    calls.locations    {"my_parallel.py:25 in backward": "all_to_all_single"}

Two kinds of calls are not changed:

- calls of torch's own Python code (DistributedDataParallel, fully_shard, DTensor, functional collectives) and of
  everyrank, because they wait through their own streams, events and futures
- calls whose buffers are integers, which have no NaN

It works with every backend, because it patches the functions of torch.distributed. That includes functions that user
code has already imported by name.
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

# function of torch.distributed -> the argument that it fills
_OUTPUT_ARGUMENTS = {
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
_MAX_PENDING = 256  # works of one process that are kept for `torch.cuda.synchronize`
_LIBRARIES = ("torch", "everyrank")
# modules whose wrappers stand between the caller and the function
_WRAPPER_MODULES = ("torch.distributed.c10d_logger", "contextlib", "functools")


@dataclass
class AsyncCalls:
    """The asynchronous calls of user code inside `nan_until_wait`.

    locations        "file.py:25 in function" -> the name of the collective, for each line that has called one
    only_locations   locations whose buffers are filled with NaN; None: all
    pending          works whose result `torch.cuda.synchronize` copies to the user's tensors; only with CUDA
    """

    locations: dict[str, str] = field(default_factory=dict[str, str])
    only_locations: frozenset[str] | None = None
    pending: list[DelayedWork] = field(default_factory=list["DelayedWork"], repr=False)

    def record(self, location: str, operation: str) -> bool:
        """Record a call, and return whether its buffers shall be filled with NaN."""
        self.locations.setdefault(location, operation)
        return self.only_locations is None or location in self.only_locations

    @contextlib.contextmanager
    def limited_to(self, *locations: str) -> Generator[None]:
        """Fill only the buffers of calls from these lines, inside a `with` block."""
        previous, self.only_locations = self.only_locations, frozenset(locations)
        try:
            yield
        finally:
            self.only_locations = previous


class DelayedWork(Work):
    """The `Work` of a collective that fills private copies; waiting for it copies the result to the user's tensors.

    work           the `Work` of the collective
    pairs          (the user's tensor, the private copy that the collective fills)
    user_tensors   data pointer of each private copy -> the user's tensor
    is_delivered   whether the result has been copied
    """

    def __init__(self, work: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.work, self.pairs = work, list(pairs)
        self.user_tensors = {private.data_ptr(): tensor for tensor, private in pairs}
        self.is_delivered, self.lock = False, threading.Lock()

    def deliver(self) -> None:
        """Copy the result to the user's tensors, once. Call it only after a wait for the collective."""
        with self.lock:
            if self.is_delivered:
                return
            for tensor, private in self.pairs:
                tensor.data.copy_(private)  # .data, because autograd must not see this as an in-place change
            self.is_delivered, self.pairs = True, []

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Wait for the collective, then deliver its result."""
        is_done = self.work.wait(*args, **kwargs)
        self.deliver()
        return bool(is_done)

    def synchronize(self) -> None:
        """Make the current stream wait for the collective, then deliver the result on this stream."""
        self.work.synchronize()
        self.deliver()

    def block_current_stream(self) -> None:
        """Do the same as `synchronize`, without blocking the CPU."""
        self.work.block_current_stream()
        self.deliver()

    def is_completed(self) -> bool:
        """Return whether the collective is done; if so, deliver its result."""
        is_done = bool(self.work.is_completed())
        if is_done:
            self.deliver()
        return is_done

    def is_success(self) -> bool:
        """Return whether the collective is done and has not failed."""
        return bool(self.work.is_success())

    def exception(self) -> Any:
        """Return the error of the collective."""
        return self.work.exception()

    def result(self) -> Any:
        """Return the user's tensors that the collective fills."""
        self.is_completed()
        return self._to_user_tensors(self.work.result())

    def source_rank(self) -> int:
        """Return the sender's rank, for a completed receive."""
        return int(self.work.source_rank())

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a future of the user's tensors, which get the result before any callback runs."""

        def deliver_value(future: Any) -> Any:
            value = future.value()
            self.deliver()
            return self._to_user_tensors(value)

        return self.work.get_future().then(deliver_value)

    def _to_user_tensors(self, value: Any) -> Any:
        """Replace private copies by the user's tensors, also inside lists and tuples."""
        if isinstance(value, Tensor):
            return self.user_tensors.get(value.data_ptr(), value)
        if isinstance(value, list | tuple):
            return type(value)(self._to_user_tensors(item) for item in value)  # pyright: ignore[reportCallIssue]
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


_ACTIVE: list[AsyncCalls] = []


def active_async_calls() -> AsyncCalls | None:
    """Return the calls of the current `nan_until_wait` block; None outside of one."""
    return _ACTIVE[-1] if _ACTIVE else None


@contextlib.contextmanager
def nan_until_wait() -> Generator[AsyncCalls]:
    """Fill the output buffers of `async_op=True` collectives, and of `irecv`, with NaN until they are waited for.

    Yields the calls that user code makes inside the `with` block. A nested block yields those of the outer one.

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
    restores: list[Callable[[], None]] = []
    for name in (*_OUTPUT_ARGUMENTS, "batch_isend_irecv"):
        function = getattr(dist, name, None) or getattr(dist.distributed_c10d, name, None)
        if function is not None:
            restores.append(_patch(name, function, calls))
    if torch.cuda.is_available():
        restores.append(_patch_attribute(torch.cuda, "synchronize", functools.partial(_delivering_synchronize, calls)))
    _ACTIVE.append(calls)
    try:
        yield calls
    finally:
        _ACTIVE.remove(calls)
        for restore in restores:
            restore()


def _patch(name: str, function: Any, calls: AsyncCalls) -> Callable[[], None]:
    """Replace a function of torch.distributed by its delayed version; return a function that restores it.

    torch's decorator keeps the original function in a closure cell. Changing that cell also affects names that user
    code has already imported. If torch has no such decorator, the attributes of its modules are replaced.
    """
    original = getattr(function, "__wrapped__", None)
    make = _delayed_batch if name == "batch_isend_irecv" else functools.partial(_delayed_collective, name)
    for cell in getattr(function, "__closure__", None) or ():
        if original is not None and cell.cell_contents is original:
            cell.cell_contents = make(original, calls)
            return functools.partial(setattr, cell, "cell_contents", original)
    delayed = functools.wraps(function)(make(function, calls))
    restores = [
        _patch_attribute(module, name, lambda _, delayed=delayed: delayed)
        for module in (dist, dist.distributed_c10d)
        if getattr(module, name, None) is function
    ]

    def restore_all() -> None:
        for restore in restores:
            restore()

    return restore_all


def _patch_attribute(module: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace an attribute by `make(attribute)`; return a function that restores it."""
    original = getattr(module, name)
    setattr(module, name, make(original))
    return functools.partial(setattr, module, name, original)


def _delivering_synchronize(calls: AsyncCalls, synchronize: Any) -> Any:
    """Return a `torch.cuda.synchronize` that delivers the results of all collectives that are done after it."""

    @functools.wraps(synchronize)
    def delivering(*args: Any, **kwargs: Any) -> Any:
        result = synchronize(*args, **kwargs)
        calls.pending = [work for work in calls.pending if not work.is_completed()]
        return result

    return delivering


def _caller() -> str | None:
    """Return the line of user code that calls a collective, "file.py:25 in function"; None if a library calls it."""
    frame: Any = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_WRAPPER_MODULES):
        frame = frame.f_back
    if frame is None or str(frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES:
        return None
    direct_caller = frame
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or direct_caller
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _delayed_collective(name: str, original: Callable[..., Any], calls: AsyncCalls) -> Callable[..., Any]:
    """Return a version of a function of torch.distributed that runs asynchronous calls on private copies."""
    signature = inspect.signature(original)

    def delayed(*args: Any, **kwargs: Any) -> Any:
        is_async = name == "irecv" or kwargs.get("async_op") or (len(args) > 2 and any(arg is True for arg in args))
        location = _caller() if is_async else None
        if location is None:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        outputs = list(_flatten(arguments.get(_OUTPUT_ARGUMENTS[name])))
        if not (name == "irecv" or arguments.get("async_op")) or not _can_delay(outputs, arguments.get("group")):
            return original(*args, **kwargs)
        if not calls.record(location, name):
            return original(*args, **kwargs)
        pairs = [(tensor, _private_copy(tensor)) for tensor in outputs]
        _substitute_copies(arguments, _OUTPUT_ARGUMENTS[name], pairs)
        work = original(*bound.args, **bound.kwargs)
        if work is None:  # this rank is not in the group
            return None
        return _delay(work, pairs, calls, is_read_only=_only_reads(name, arguments))

    return delayed


def _delay(work: Any, pairs: list[tuple[Tensor, Tensor]], calls: AsyncCalls, is_read_only: bool = False) -> DelayedWork:
    """Fill the user's tensors with NaN, unless the collective only reads them, and return the delayed work."""
    delayed = DelayedWork(work, pairs)
    if not is_read_only:
        for tensor, _ in pairs:
            tensor.data.fill_(float("nan"))
    if torch.cuda.is_available():
        calls.pending = [
            *(earlier for earlier in calls.pending[-_MAX_PENDING:] if not earlier.is_delivered),
            delayed,
        ]
    return delayed


def _delayed_batch(original: Callable[..., Any], calls: AsyncCalls) -> Callable[..., Any]:
    """Return a version of `batch_isend_irecv` whose receives fill private copies."""

    def delayed(p2p_op_list: Sequence[Any]) -> Any:
        location = _caller()
        receives = [op for op in p2p_op_list if getattr(op.op, "__name__", "") == "irecv"]
        tensors = [op.tensor for op in receives]
        if location is None or not _can_delay(tensors, None) or not calls.record(location, "batch_isend_irecv"):
            return original(p2p_op_list)
        pair_of_op = {id(op): (op.tensor, _private_copy(op.tensor)) for op in receives}
        ops = [
            dist.P2POp(op.op, pair_of_op[id(op)][1], group=op.group, tag=op.tag, group_peer=op.group_peer)
            if id(op) in pair_of_op
            else op
            for op in p2p_op_list
        ]
        works = original(ops)
        if len(works) == len(ops):
            pairs_of_works = [[pair_of_op[id(op)]] if id(op) in pair_of_op else [] for op in p2p_op_list]
        else:  # the backend returns one work for all operations
            pairs_of_works = [list(pair_of_op.values())] + [[] for _ in works[1:]]
        return [
            _delay(work, pairs, calls) if pairs else work for work, pairs in zip(works, pairs_of_works, strict=True)
        ]

    return delayed


def _flatten(value: Any) -> Iterator[Any]:
    """Yield the tensors of an argument: a tensor, nested lists of tensors, or None."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flatten(item)
    elif value is not None:
        yield value


def _can_delay(outputs: Sequence[Any], group: Any) -> bool:
    """Return whether these are plain, floating-point or complex tensors, which can hold NaN.

    False inside a coalescing manager, whose calls return no work.
    """
    coalescing: Any = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_coalesce_state", {})
    default_group = dist.group.WORLD
    if (group or default_group) in coalescing:
        return False
    return bool(outputs) and all(
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and (tensor.is_floating_point() or tensor.is_complex())
        # an expanded tensor has several elements in one place
        and not any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        for tensor in outputs
    )


def _private_copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, so that a backend still refuses strides that it does not support."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach())


def _substitute_copies(arguments: dict[str, Any], name: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Replace the output tensors, in argument `name`, by their private copies.

    Inputs that share memory with an output are copied, too, because the output is filled with NaN.
    """
    private_copies = {id(tensor): copy for tensor, copy in pairs}
    output_storages = {tensor.untyped_storage().data_ptr() for tensor, _ in pairs}

    def substitute(value: Any, is_output: bool) -> Any:
        if isinstance(value, list | tuple):
            return [substitute(item, is_output) for item in value]
        if not isinstance(value, Tensor):
            return value
        if is_output:
            return private_copies[id(value)]
        is_shared = type(value) in (Tensor, nn.Parameter) and value.untyped_storage().data_ptr() in output_storages
        return value.detach().clone() if is_shared else value

    for key, value in list(arguments.items()):
        if key == name or isinstance(value, Tensor | list | tuple):
            arguments[key] = substitute(value, key == name)


def _only_reads(name: str, arguments: dict[str, Any]) -> bool:
    """Return whether the collective leaves this rank's tensor unchanged: a broadcast does on its source rank, and a
    reduce on all ranks but its destination.
    """
    if name not in ("broadcast", "reduce"):
        return False
    group: Any = arguments.get("group") or dist.group.WORLD
    role = "src" if name == "broadcast" else "dst"
    root = arguments.get(f"group_{role}")
    if root is None:
        root = dist.get_group_rank(group, arguments[role]) if group is not dist.group.WORLD else arguments[role]
    return (dist.get_rank(group) == root) == (name == "broadcast")
