"""PythonGroup: the process group that torch sees, shared by all backends written in Python.

It has all methods that c10d, DistributedDataParallel, `fully_shard` and DTensor call, and translates them to the few
operations of a `Transport`. Those are generators (engine.py) over contiguous, one-dimensional CPU tensors.
"""

from __future__ import annotations

import contextlib
import datetime
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from everyrank.backends.engine import DONE, ENGINE, PendingWork, profiler_range
from everyrank.backends.operation_queue import OperationQueue, Steps
from everyrank.backends.recent import RECENT_CALLS, RecentCall
from everyrank.backends.transport import Transport

__all__ = ["PythonGroup", "is_observed", "observe_call", "observed_calls"]

_Observer = Callable[[str, str, Sequence[Tensor]], None]
_OBSERVERS: list[_Observer] = []
_REDUCE_OP: Any = dist.ReduceOp.RedOpType
# by number, because the C++ enums are slow to compare
_REDUCTIONS = {int(op): name.lower() for name, op in _REDUCE_OP.__members__.items()}
_SUM: Any = dist.ReduceOp.SUM
_GROUP_NAMES: set[str] = set()


@contextlib.contextmanager
def observed_calls(observer: _Observer) -> Generator[None]:
    """Call `observer(operation, group_name, input_tensors)` at every call of a `PythonGroup` and every `observe_call`.

    For a receive, `input_tensors` is the tensor that it fills.
    """
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)


def observe_call(operation: str, group_name: str, input_tensors: Sequence[Tensor]) -> None:
    """Report a call to the observers; libraries that communicate without torch, such as Horovod, use it directly."""
    for observer in _OBSERVERS:
        observer(operation, group_name, input_tensors)


def is_observed(group_name: str) -> bool:
    """Return whether the group of that name is a `PythonGroup`, whose calls the observers see."""
    return group_name in _GROUP_NAMES


_ProcessGroup: Any = dist.ProcessGroup  # Any, because the overloads in its stubs have other signatures


class PythonGroup(_ProcessGroup):
    """A process group of torch over a `Transport`."""

    supports_splitting = supports_coalescing = False
    supports_time_estimate = _supports_time_estimate = False  # the second is its name since torch 2.14
    bound_device_id = None

    def __init__(self, transport: Transport, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self.transport, self.num_ranks, self.registered_name, self.description = transport, size, name, ""
        self.is_closed = False

    # attributes of a group that torch reads and sets

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name under which the backend is registered."""
        return self.transport.backend

    name = getBackendName

    @property
    def group_name(self) -> str:
        """The name under which torch finds this group."""
        return self.registered_name

    def _set_group_name(self, name: str) -> None:
        self.registered_name = name
        _GROUP_NAMES.add(name)
        RECENT_CALLS.reset_group(name)

    @property
    def group_desc(self) -> str:
        """The description that torch gives this group."""
        return self.description

    def _set_group_desc(self, desc: str) -> None:
        self.description = desc

    def _get_backend(self, _: Any) -> PythonGroup:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the timeout of pending and later operations."""
        with ENGINE.lock:
            for queue in self.transport.queues():
                queue.timeout_seconds = timeout.total_seconds()

    def shutdown(self) -> None:
        """Fail all pending operations and close the transport. It may be called again."""
        with ENGINE.lock:
            for queue in self.transport.queues():
                ENGINE.abort_queue(queue)
        _GROUP_NAMES.discard(self.registered_name)
        if not self.is_closed:
            self.is_closed = True
            self.transport.close()

    abort = shutdown

    # collectives

    def allreduce(self, tensors: Any, opts: Any = None) -> PendingWork:
        """Reduce over all ranks in place, for `dist.all_reduce` and DistributedDataParallel."""
        tensors, buffers, reduction = _as_list(tensors), FlatBuffers(), _reduction(opts)
        flats = [buffers.writable(tensor) for tensor in tensors]
        steps = _in_sequence([self.transport.collectives.all_reduce(flat, reduction) for flat in flats])
        return self._run("all_reduce", steps, flats, tensors, opts, buffers)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None) -> PendingWork:
        """Reduce over all ranks on the root, for `dist.reduce`."""
        buffers = FlatBuffers()
        flat = buffers.writable(tensors[0])
        steps = self.transport.collectives.reduce(flat, _reduction(opts), opts.rootRank)
        return self._run("reduce", steps, [flat], tensors, opts, buffers)

    def broadcast(self, tensors: Any, opts: Any = None) -> PendingWork:
        """Copy tensors of the root to all ranks, for `dist.broadcast` and DistributedDataParallel."""
        tensors, buffers = _as_list(tensors), FlatBuffers()
        flats = [buffers.writable(tensor) for tensor in tensors]
        steps = _in_sequence([self.transport.collectives.broadcast(flat, opts.rootRank) for flat in flats])
        return self._run("broadcast", steps, flats, tensors, opts, buffers)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        """Gather each input tensor into a list of tensors, for `dist.all_gather`: `outputs[tensor][rank]`."""
        buffers, flat_inputs = FlatBuffers(), [flattened(tensor) for tensor in inputs]
        steps = [
            self._all_gather([buffers.writable(tensor) for tensor in rank_outputs], flat_input)
            for rank_outputs, flat_input in zip(outputs, flat_inputs, strict=True)
        ]
        return self._run("all_gather", _in_sequence(steps), flat_inputs, outputs, opts, buffers)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        """Gather several tensors of each rank, into `outputs[rank][tensor]`."""
        return self.allgather([list(rank_outputs) for rank_outputs in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        """Gather each input tensor into one output tensor, for functional collectives."""
        buffers, flat_inputs = FlatBuffers(), [flattened(tensor) for tensor in inputs]
        steps = [
            self._all_gather(list(buffers.writable(output).chunk(self.num_ranks)), flat_input)
            for output, flat_input in zip(outputs, flat_inputs, strict=True)
        ]
        return self._run("all_gather", _in_sequence(steps), flat_inputs, outputs, opts, buffers)

    def all_gather_single(self, output: Any, input_tensor: Any, opts: Any = None) -> PendingWork:
        """Gather into one output tensor, for `dist.all_gather_into_tensor`."""
        return self.all_gather_single_coalesced([output], [input_tensor], opts)

    def _all_gather(self, outputs: list[Tensor], input_tensor: Tensor) -> Steps:
        check_lengths("all_gather", outputs, input_tensor, self.num_ranks)
        return self.transport.collectives.all_gather(outputs, input_tensor)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        """Gather into a list of tensors on the root, for `dist.gather`."""
        buffers, flat_input = FlatBuffers(), flattened(inputs[0])
        flat_outputs = [buffers.writable(tensor) for tensor in outputs[0]] if outputs else []
        check_lengths("gather", flat_outputs, flat_input, len(flat_outputs) and self.num_ranks)
        steps = self.transport.collectives.gather(flat_outputs, flat_input, opts.rootRank)
        return self._run("gather", steps, [flat_input], outputs, opts, buffers)

    def gather_single(self, output: Any, input_tensor: Any, opts: Any = None) -> PendingWork:
        """Gather into one tensor on the root, for `dist.gather_single` (since torch 2.14)."""
        buffers, flat_input = FlatBuffers(), flattened(input_tensor)
        is_root = opts.rootRank == self.rank()
        flat_outputs = list(buffers.writable(output).chunk(self.num_ranks)) if is_root else []
        check_lengths("gather", flat_outputs, flat_input, len(flat_outputs) and self.num_ranks)
        steps = self.transport.collectives.gather(flat_outputs, flat_input, opts.rootRank)
        return self._run("gather", steps, [flat_input], [output], opts, buffers)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        """Copy one of the root's tensors to each rank, for `dist.scatter`."""
        buffers = FlatBuffers()
        flat_output = buffers.writable(outputs[0])
        flat_inputs = [flattened(tensor) for tensor in inputs[0]] if inputs else []
        check_lengths("scatter", flat_inputs, flat_output, len(flat_inputs) and self.num_ranks)
        steps = self.transport.collectives.scatter(flat_output, flat_inputs, opts.rootRank)
        return self._run("scatter", steps, flat_inputs, outputs, opts, buffers)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        """Reduce lists of tensors over all ranks and keep this rank's, for `dist.reduce_scatter`.

        outputs   [tensor]
        inputs    [tensor][rank]
        """
        buffers, reduction = FlatBuffers(), _reduction(opts)
        flat_inputs = [[flattened(tensor) for tensor in rank_inputs] for rank_inputs in inputs]
        steps: list[Steps] = []
        for tensor, rank_inputs in zip(outputs, flat_inputs, strict=True):
            flat_output = buffers.writable(tensor)
            check_lengths("reduce_scatter", rank_inputs, flat_output, self.num_ranks)
            steps.append(self.transport.collectives.reduce_scatter(flat_output, rank_inputs, reduction))
        all_inputs = [flat_input for rank_inputs in flat_inputs for flat_input in rank_inputs]
        return self._run("reduce_scatter", _in_sequence(steps), all_inputs, outputs, opts, buffers)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        """Reduce-scatter several tensors, each split evenly among the ranks, for functional collectives."""
        rank_inputs = [flattened(tensor).chunk(self.num_ranks) for tensor in inputs]
        return self.reduce_scatter(outputs, rank_inputs, opts)

    def reduce_scatter_single(self, output: Any, input_tensor: Any, opts: Any = None) -> PendingWork:
        """Reduce-scatter one tensor, split evenly among the ranks, for `dist.reduce_scatter_tensor`."""
        return self.reduce_scatter_single_coalesced([output], [input_tensor], opts)

    def all_to_all_single(
        self, output: Any, input_tensor: Any, output_rows: Any, input_rows: Any, opts: Any = None
    ) -> PendingWork:
        """Exchange rows of one tensor with each rank, for `dist.all_to_all_single`.

        output_rows, input_rows   number of rows (dimension 0) for each rank; empty for equal numbers
        """
        buffers, flat_input = FlatBuffers(), flattened(input_tensor)
        flat_output = buffers.writable(output)
        steps = self.transport.collectives.all_to_all(
            split_rows(flat_output, output, output_rows, self.num_ranks),
            split_rows(flat_input, input_tensor, input_rows, self.num_ranks),
        )
        return self._run("all_to_all", steps, [flat_input], [output], opts, buffers)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        """Exchange a tensor with each rank, for `dist.all_to_all`."""
        buffers, flat_inputs = FlatBuffers(), [flattened(tensor) for tensor in inputs]
        steps = self.transport.collectives.all_to_all([buffers.writable(tensor) for tensor in outputs], flat_inputs)
        return self._run("all_to_all", steps, flat_inputs, outputs, opts, buffers)

    def barrier(self, opts: Any = None) -> PendingWork:
        """Wait until all ranks have reached the barrier, for `dist.barrier`."""
        return self._run("barrier", self.transport.collectives.barrier(), [], [], opts, FlatBuffers())

    def monitored_barrier(self, *_: object, **__: object) -> None:
        """Raise `ValueError`, as `dist.monitored_barrier` itself does until torch 2.14 for any backend but gloo."""
        raise ValueError("monitored_barrier is only implemented for GLOO backend.")

    # torch's other names
    gather_into_tensor = gather_single
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # messages

    def send(self, tensors: Any, to: int, tag: int) -> PendingWork:
        """Send a tensor, for `dist.send` and `dist.isend`."""
        flat = flattened(tensors[0])
        queue, steps = self.transport.messages.send(flat, to, tag)
        return self._run_message("send", queue, steps, [flat], tensors)

    def recv(self, tensors: Any, source: int | None, tag: int) -> PendingWork:
        """Receive a tensor, for `dist.recv` and `dist.irecv`."""
        buffers = FlatBuffers()
        flat = buffers.writable(tensors[0])
        with ENGINE.lock:  # no other thread may take the message between the search for it and the posted receive
            queue, steps = self.transport.messages.receive(flat, source, tag)
        return self._run_message("recv", queue, buffers.copy_back_after(steps), [flat], tensors)

    def recv_anysource(self, tensors: Any, tag: int) -> PendingWork:
        """Receive a tensor from any rank."""
        return self.recv(tensors, None, tag)

    def _run_message(
        self, name: str, queue: OperationQueue, steps: Steps, flats: list[Tensor], tensors: Any
    ) -> PendingWork:
        operation = PendingWork(f"{self.transport.backend} {name}", queue, steps, list(tensors))
        self._record_call(name, flats).work = weakref.ref(operation)
        ENGINE.start(operation)
        return ENGINE.finish_or_leave(operation, is_async=True, grace_seconds=0.0)

    def _run(
        self, name: str, steps: Steps, inputs: Sequence[Tensor], outputs: Any, opts: Any, buffers: FlatBuffers
    ) -> PendingWork:
        """Start a collective and return its `Work`; a synchronous one is done then."""
        queue, is_async = self.transport.queue, bool(getattr(opts, "asyncOp", False))
        steps = buffers.copy_back_after(steps)
        call = self._record_call(name, inputs)
        with profiler_range(self.transport.backend, name):
            with (
                ENGINE.lock
            ):  # no other thread may start a collective between the first step and the entry in the queue
                # c10d's functions, which pass `opts`, only wait for the Work of a synchronous call, so all share one
                if opts is not None and not is_async and queue.try_finish(steps):
                    call.is_done = True
                    return DONE
                work = PendingWork(f"{self.transport.backend} {name}", queue, steps, list(outputs))
                call.work = weakref.ref(work)
                ENGINE.start(work)
            return ENGINE.finish_or_leave(work, is_async)

    def _record_call(self, name: str, inputs: Sequence[Tensor]) -> RecentCall:
        if _OBSERVERS:
            observe_call(name, self.registered_name, inputs)
        return RECENT_CALLS.record(name, self.registered_name, inputs)


def _as_list(tensors: Any) -> Any:
    return tensors if isinstance(tensors, (list, tuple)) else [tensors]


def _reduction(opts: Any) -> str:
    """Return the name of the reduction in the options of a call: "sum", "avg", ..."""
    if opts is None or opts.reduceOp == _SUM:  # checked first, because it is three times as fast as the lookup below
        return "sum"
    return _REDUCTIONS[int(opts.reduceOp.op)]


def _in_sequence(steps: list[Steps]) -> Steps:
    """Return steps that run all of the given ones, one after the other."""
    return steps[0] if len(steps) == 1 else _chained(steps)


def _chained(steps: list[Steps]) -> Steps:
    for step in steps:
        yield from step


# --- tensors of users as contiguous, one-dimensional tensors


class FlatBuffers:
    """Flat buffers for the output tensors of a call. The copy of a non-contiguous tensor is copied back at the end.

    copies   (the user's tensor, its contiguous copy)
    """

    def __init__(self) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []

    def writable(self, tensor: Tensor) -> Tensor:
        """Return a one-dimensional view of an output tensor, or a copy if it is not contiguous."""
        flat = flattened(tensor)
        if not tensor.is_contiguous():
            self.copies.append((tensor.data, flat))
        return flat

    def copy_back_after(self, steps: Steps) -> Steps:
        """Return steps that run the given ones and then copy all copies back."""
        return self._then_copy_back(steps) if self.copies else steps

    def _then_copy_back(self, steps: Steps) -> Steps:
        value = yield from steps
        for tensor, flat in self.copies:
            tensor.copy_(flat.view(tensor.shape))
        return value


def flattened(tensor: Tensor) -> Tensor:
    """Return all elements in one dimension, outside autograd: a view, or a copy if the tensor is not contiguous.

    Raises `RuntimeError` for tensors that are sparse or not on the CPU.
    """
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise RuntimeError(
            f"this backend supports only dense tensors on the CPU; this tensor is {tensor.layout} on {tensor.device}"
        )
    data = tensor.data if tensor.is_contiguous() else tensor.data.contiguous()
    if data.dim() == 1 and data.stride(0) == 1:
        return data
    return data.as_strided((data.numel(),), (1,))  # a tensor of one element is contiguous with any stride


def split_rows(flat: Tensor, tensor: Tensor, rows: Sequence[int], num_ranks: int) -> list[Tensor]:
    """Return the chunk of `flat` for each rank: `rows[rank]` rows of `tensor`, or equal numbers if `rows` is empty."""
    if not rows:
        if len(tensor) % num_ranks:
            raise RuntimeError(
                f"all_to_all_single: {len(tensor)} rows cannot be divided equally among {num_ranks} ranks; "
                "give the split sizes"
            )
        return list(flat.split(max(1, len(flat) // num_ranks))) if len(flat) else [flat] * num_ranks
    row_length = len(flat) // max(1, len(tensor))
    return list(flat.split([count * row_length for count in rows]))


def check_lengths(operation: str, chunks: Sequence[Tensor], tensor: Tensor, count: int) -> None:
    """Raise `RuntimeError` unless there are `count` chunks, all with the length and dtype of `tensor`."""
    if len(chunks) != count:
        raise RuntimeError(f"{operation}: {len(chunks)} tensors for {count} ranks; give one tensor for each rank")
    for chunk in chunks:
        if chunk.nbytes != tensor.nbytes or chunk.dtype != tensor.dtype:
            raise RuntimeError(
                f"{operation}: one tensor has {len(chunk)} elements of {chunk.dtype}, another one has {len(tensor)} of "
                f"{tensor.dtype}; give tensors of one length and dtype"
            )
