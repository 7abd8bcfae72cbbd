"""c10d's calls as a few operations on contiguous tensors: what every backend written in Python shares.

`PythonGroup` is the process group that torch sees: all names and forms under which c10d, DistributedDataParallel,
`fully_shard` and DTensor call a collective. `Transport` is what a backend gives: generators (engine.py) that move flat
tensors on CPU.
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

from everyrank.backends.engine import DONE, ENGINE, PendingWork, recorded
from everyrank.backends.operation_queue import OperationQueue, Steps
from everyrank.backends.recent import RECENT_CALLS, RecentCall
from everyrank.backends.transport import Transport

__all__ = ["PythonGroup", "is_observed", "observe_call", "observed_calls"]

_Observer = Callable[[str, str, Sequence[Tensor]], None]
_OBSERVERS: list[_Observer] = []
_REDUCE_OP: Any = dist.ReduceOp.RedOpType
_REDUCTIONS = {int(op): name.lower() for name, op in _REDUCE_OP.__members__.items()}  # C++ enums compare slowly
_SUM: Any = dist.ReduceOp.SUM
_NAMES: set[str] = set()


@contextlib.contextmanager
def observed_calls(observer: _Observer) -> Generator[None]:
    """Call `observer(operation, group name, the tensors that this rank hands in)` at every call of a `PythonGroup`.

    And at every `observe_call`.
    """
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)


def observe_call(operation: str, group_name: str, handed_in: Sequence[Tensor]) -> None:
    """Tell the observers of a call: also one of communication that is not torch's."""
    for observer in _OBSERVERS:
        observer(operation, group_name, handed_in)


def is_observed(group_name: str) -> bool:
    """Whether a group of that name is a `PythonGroup`, whose calls observers see."""
    return group_name in _NAMES


_ProcessGroup: Any = dist.ProcessGroup  # its stubs give each method another shape from call to call


class PythonGroup(_ProcessGroup):
    """A process group of torch over a `Transport`."""

    supports_splitting = supports_coalescing = False
    supports_time_estimate = _supports_time_estimate = False  # the second name: since torch 2.14
    bound_device_id = None

    def __init__(self, transport: Transport, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self.transport, self.num_ranks, self.given_name, self.desc = transport, size, name, ""
        self.is_shut = False

    # what torch asks a group about itself

    def getBackendName(self) -> str:  # noqa: N802
        """Under which it is registered."""
        return self.transport.backend

    name = getBackendName

    @property
    def group_name(self) -> str:
        """Under which torch finds this group."""
        return self.given_name

    def _set_group_name(self, name: str) -> None:
        self.given_name = name
        _NAMES.add(name)
        RECENT_CALLS.forget(name)

    @property
    def group_desc(self) -> str:
        """What torch says that it is for."""
        return self.desc

    def _set_group_desc(self, desc: str) -> None:
        self.desc = desc

    def _get_backend(self, _: Any) -> PythonGroup:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """For operations from now on."""
        with ENGINE.lock:
            for queue in self.transport.queues():
                queue.timeout_seconds = timeout.total_seconds()

    def shutdown(self) -> None:
        """Let go of the transport; whoever still waits is told so. Again and again is as good as once."""
        with ENGINE.lock:
            for queue in self.transport.queues():
                ENGINE.forget(queue)
        _NAMES.discard(self.given_name)
        if not self.is_shut:
            self.is_shut = True
            self.transport.close()

    abort = shutdown

    # collectives

    def allreduce(self, tensors: Any, opts: Any = None) -> PendingWork:
        """What `dist.all_reduce` and DistributedDataParallel call."""
        tensors, back, reduction = _listed(tensors), Outputs(), _reduction(opts)
        flats = [back.out(tensor) for tensor in tensors]
        steps = _each([self.transport.collectives.all_reduce(flat, reduction) for flat in flats])
        return self._run("all_reduce", steps, flats, tensors, opts, back)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None) -> PendingWork:
        """What `dist.reduce` calls."""
        back = Outputs()
        flat = back.out(tensors[0])
        steps = self.transport.collectives.reduce(flat, _reduction(opts), opts.rootRank)
        return self._run("reduce", steps, [flat], tensors, opts, back)

    def broadcast(self, tensors: Any, opts: Any = None) -> PendingWork:
        """What `dist.broadcast` and DistributedDataParallel call."""
        tensors, back = _listed(tensors), Outputs()
        flats = [back.out(tensor) for tensor in tensors]
        steps = _each([self.transport.collectives.broadcast(flat, opts.rootRank) for flat in flats])
        return self._run("broadcast", steps, flats, tensors, opts, back)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        """What `dist.all_gather` calls: a list of tensors."""
        back, sent = Outputs(), [flattened(tensor) for tensor in inputs]
        steps = [
            self._all_gather([back.out(tensor) for tensor in parts], flat)
            for parts, flat in zip(outputs, sent, strict=True)
        ]
        return self._run("all_gather", _each(steps), sent, outputs, opts, back)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        """Several tensors of each rank: `outputs[rank][tensor]`."""
        return self.allgather([list(parts) for parts in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        """What functional collectives call, several at once: one tensor for all parts of each."""
        back, sent = Outputs(), [flattened(tensor) for tensor in inputs]
        steps = [
            self._all_gather(list(back.out(whole).chunk(self.num_ranks)), flat)
            for whole, flat in zip(outputs, sent, strict=True)
        ]
        return self._run("all_gather", _each(steps), sent, outputs, opts, back)

    def all_gather_single(self, output: Any, sent: Any, opts: Any = None) -> PendingWork:
        """What `dist.all_gather_into_tensor` calls: one tensor for all parts."""
        return self.all_gather_single_coalesced([output], [sent], opts)

    def _all_gather(self, parts: list[Tensor], sent: Tensor) -> Steps:
        check_alike("all_gather", parts, sent, self.num_ranks)
        return self.transport.collectives.all_gather(parts, sent)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        """What `dist.gather` calls."""
        back, sent = Outputs(), flattened(inputs[0])
        parts = [back.out(tensor) for tensor in outputs[0]] if outputs else []
        check_alike("gather", parts, sent, len(parts) and self.num_ranks)
        steps = self.transport.collectives.gather(parts, sent, opts.rootRank)
        return self._run("gather", steps, [sent], outputs, opts, back)

    def gather_single(self, output: Any, sent: Any, opts: Any = None) -> PendingWork:
        """What `dist.gather_single` (since torch 2.14) calls: one tensor for all parts, empty where not the root."""
        back, flat = Outputs(), flattened(sent)
        parts = list(back.out(output).chunk(self.num_ranks)) if opts.rootRank == self.rank() else []
        check_alike("gather", parts, flat, len(parts) and self.num_ranks)
        steps = self.transport.collectives.gather(parts, flat, opts.rootRank)
        return self._run("gather", steps, [flat], [output], opts, back)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        """What `dist.scatter` calls."""
        back = Outputs()
        received = back.out(outputs[0])
        parts = [flattened(tensor) for tensor in inputs[0]] if inputs else []
        check_alike("scatter", parts, received, len(parts) and self.num_ranks)
        steps = self.transport.collectives.scatter(received, parts, opts.rootRank)
        return self._run("scatter", steps, parts, outputs, opts, back)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        """What `dist.reduce_scatter` calls: a list of tensors."""
        back, reduction = Outputs(), _reduction(opts)
        parts = [[flattened(tensor) for tensor in rank_parts] for rank_parts in inputs]
        steps: list[Steps] = []
        for tensor, rank_parts in zip(outputs, parts, strict=True):
            flat = back.out(tensor)
            check_alike("reduce_scatter", rank_parts, flat, self.num_ranks)
            steps.append(self.transport.collectives.reduce_scatter(flat, rank_parts, reduction))
        return self._run(
            "reduce_scatter", _each(steps), [chunk for rank_parts in parts for chunk in rank_parts], outputs, opts, back
        )

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        """What functional collectives call, several at once: all parts of each in one tensor."""
        parts = [flattened(tensor).chunk(self.num_ranks) for tensor in inputs]
        return self.reduce_scatter(outputs, parts, opts)

    def reduce_scatter_single(self, output: Any, whole: Any, opts: Any = None) -> PendingWork:
        """What `dist.reduce_scatter_tensor` calls: all parts in one tensor."""
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    def all_to_all_single(self, output: Any, whole: Any, taken: Any, given: Any, opts: Any = None) -> PendingWork:
        """What `dist.all_to_all_single` calls; without splits along dimension 0, as many rows to each rank."""
        back, sent = Outputs(), flattened(whole)
        received = back.out(output)
        steps = self.transport.collectives.all_to_all(
            split_rows(received, output, taken, self.num_ranks), split_rows(sent, whole, given, self.num_ranks)
        )
        return self._run("all_to_all", steps, [sent], [output], opts, back)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        """What `dist.all_to_all` calls: lists of tensors."""
        back, sent = Outputs(), [flattened(tensor) for tensor in inputs]
        steps = self.transport.collectives.all_to_all([back.out(tensor) for tensor in outputs], sent)
        return self._run("all_to_all", steps, sent, outputs, opts, back)

    def barrier(self, opts: Any = None) -> PendingWork:
        """What `dist.barrier` calls."""
        return self._run("barrier", self.transport.collectives.barrier(), [], [], opts, Outputs())

    def monitored_barrier(self, *_: object, **__: object) -> None:
        """Raises `ValueError`: until torch 2.14 `dist.monitored_barrier` refused other backends than gloo itself."""
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
        """What `dist.send` and `isend` call."""
        flat = flattened(tensors[0])
        queue, steps = self.transport.messages.send(flat, to, tag)
        return self._message("send", queue, steps, [flat], tensors)

    def recv(self, tensors: Any, source: int | None, tag: int) -> PendingWork:
        """What `dist.recv` and `irecv` call."""
        back = Outputs()
        flat = back.out(tensors[0])
        with ENGINE.lock:  # between looking for the message and asking for it no thread may take it
            queue, steps = self.transport.messages.receive(flat, source, tag)
        return self._message("recv", queue, back.after(steps), [flat], tensors)

    def recv_anysource(self, tensors: Any, tag: int) -> PendingWork:
        """The same without a source."""
        return self.recv(tensors, None, tag)

    def _message(
        self, name: str, queue: OperationQueue, steps: Steps, handed_in: list[Tensor], tensors: Any
    ) -> PendingWork:
        operation = PendingWork(f"{self.transport.backend} {name}", queue, steps, list(tensors))
        self._noted(name, handed_in).work = weakref.ref(operation)
        ENGINE.start(operation)
        return ENGINE.progress(operation, is_async=True, grace=0.0)

    def _run(
        self, name: str, steps: Steps, handed_in: Sequence[Tensor], tensors: Any, opts: Any, back: Outputs
    ) -> PendingWork:
        queue, is_async = self.transport.queue, bool(getattr(opts, "asyncOp", False))
        steps = back.after(steps)
        call = self._noted(name, handed_in)
        with recorded(self.transport.backend, name):
            with ENGINE.lock:  # no thread may come between what has begun and its place in the queue
                # c10d's own functions ask a synchronous work nothing
                if opts is not None and not is_async and queue.ends_at_once(steps):
                    call.is_done = True
                    return DONE
                work = PendingWork(f"{self.transport.backend} {name}", queue, steps, list(tensors))
                call.work = weakref.ref(work)
                ENGINE.start(work)
            return ENGINE.progress(work, is_async)

    def _noted(self, name: str, handed_in: Sequence[Tensor]) -> RecentCall:
        if _OBSERVERS:
            observe_call(name, self.given_name, handed_in)
        return RECENT_CALLS.note(name, self.given_name, handed_in)


def _listed(tensors: Any) -> Any:
    return tensors if isinstance(tensors, (list, tuple)) else [tensors]


def _reduction(opts: Any) -> str:
    if opts is None or opts.reduceOp == _SUM:  # a third of the time that the name of another takes
        return "sum"
    return _REDUCTIONS[int(opts.reduceOp.op)]


def _each(steps: list[Steps]) -> Steps:
    """One after the other."""
    return steps[0] if len(steps) == 1 else _chained(steps)


def _chained(steps: list[Steps]) -> Steps:
    for step in steps:
        yield from step


# --- tensors as transports take them: in one dimension, contiguous; and back


class Outputs:
    """Outputs that are not contiguous: filled in a copy, and copied back at the end."""

    def __init__(self) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []

    def out(self, tensor: Tensor) -> Tensor:
        """`tensor`, flat, to be written into."""
        flat = flattened(tensor)
        if not tensor.is_contiguous():
            self.copies.append((tensor.data, flat))
        return flat

    def after(self, steps: Steps) -> Steps:
        """`steps`, and then the copies back."""
        return self._then_copies(steps) if self.copies else steps

    def _then_copies(self, steps: Steps) -> Steps:
        value = yield from steps
        for tensor, flat in self.copies:
            tensor.copy_(flat.view(tensor.shape))
        return value


def flattened(tensor: Tensor) -> Tensor:
    """All elements in one dimension: a view where that can be, outside autograd. Raises `RuntimeError`."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise RuntimeError(f"a {tensor.layout} tensor on {tensor.device}: this backend moves dense tensors on the CPU")
    data = tensor.data if tensor.is_contiguous() else tensor.data.contiguous()
    if data.dim() == 1 and data.stride(0) == 1:
        return data
    return data.as_strided((data.numel(),), (1,))  # one element is contiguous whatever its stride is


def split_rows(flat: Tensor, tensor: Tensor, rows: Sequence[int], num_ranks: int) -> list[Tensor]:
    """The part for each rank; `rows` along dimension 0, equal ones where it is empty."""
    if not rows:
        if len(tensor) % num_ranks:
            raise RuntimeError(f"all_to_all_single: {len(tensor)} rows make no equal parts for {num_ranks} ranks")
        return list(flat.split(max(1, len(flat) // num_ranks))) if len(flat) else [flat] * num_ranks
    row = len(flat) // max(1, len(tensor))
    return list(flat.split([count * row for count in rows]))


def check_alike(operation: str, parts: Sequence[Tensor], tensor: Tensor, count: int) -> None:
    """Raises `RuntimeError` for parts that are not `count` tensors of the length and dtype of `own`."""
    if len(parts) != count:
        raise RuntimeError(f"{operation}: {len(parts)} tensors for {count} ranks: give one for each")
    for other in parts:
        if other.nbytes != tensor.nbytes or other.dtype != tensor.dtype:
            raise RuntimeError(
                f"{operation}: a tensor of {len(other)} {other.dtype} beside one of {len(tensor)} {tensor.dtype}: "
                "all ranks' tensors are alike"
            )
