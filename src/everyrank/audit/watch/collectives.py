"""Records each collective where torch hands it to its backend: operation, shapes and line.

This covers everything that the c10d operators carry, also from DDP, fully_shard and DTensor. It does not cover calls of
a backend's own functions.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from everyrank.audit.events import Altered, CollectiveCall, GroupOpened, ReduceResult
from everyrank.audit.watch.gradients import Gradients
from everyrank.audit.watch.losses import Losses
from everyrank.audit.watch.place import chain, library_calls, where
from everyrank.audit.watch.recorder import ACCELERATE_ON_CPU, Recorder, harmless, tensors

__all__ = ["Collectives", "install_process_group"]

_NUMBER = 8  # bytes
_SHAPES = 4  # tensors of a call to compare
_AS_IN_MEMORY = {"broadcast_", "allreduce_", "reduce_", "scatter_"}  # these send elements in memory order


class Collectives(TorchDispatchMode):
    """Records each collective that this thread calls."""

    def __init__(self, recorder: Recorder, gradients: Gradients) -> None:
        super().__init__()
        self.recorder, self.gradients = recorder, gradients

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().partition(".")[0].partition("::")[2]
            if "wait_tensor" not in name and "wrap" not in name and not self.recorder.is_muted:
                self._write(name, args)
        elif any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # DTensor dispatches again for its local tensors
        return func(*args, **(kwargs or {}))

    @harmless("collectives")
    def _write(self, name: str, args: Any) -> None:
        shapes = [f"{str(t.dtype)[6:]}{list(t.shape)}" for t in itertools.islice(tensors(args), _SHAPES)]
        size = sum(t.numel() * t.element_size() for t in tensors(args[:1]))
        recorder = self.recorder
        recorder.num_sent += recorder.update > 0 or recorder.phase.startswith("backward")
        number = next(tensors(args), None) if name == "allreduce_" and recorder.phase == "script" else None
        number = number if number is not None and number.numel() == 1 and size <= _NUMBER else None
        value, squares = self._gradient_norm(number)
        recorder.write(
            CollectiveCall(
                op=name,
                group=_group(args),
                shapes=shapes,
                num_bytes=size,
                reduction=_reduction(args),
                strides=_strides(tensors(args)) if name in _AS_IN_MEMORY else [],
                lines=chain(),
                phase=recorder.phase,
                library_calls=library_calls(),
                value=value,
                squares=squares,
                result=self._result(number),
            )
        )

    def _gradient_norm(self, number: Any) -> tuple[float | None, dict[str, float]]:
        """A number that the script reduces while there are gradients, which may be their norm; and their squares."""
        if number is None or not self.gradients.is_wanted:
            return None, {}
        with self.recorder.muted():
            return float(number), self.gradients.squares()

    def _result(self, number: Any) -> ReduceResult | None:
        """A number that the script reduces in an evaluation."""
        losses = self.gradients.losses
        if number is None or not losses.is_evaluating:
            return None
        with self.recorder.muted():
            return losses.ratios.sent(number)


def _strides(sent: Iterable[Any]) -> list[str]:
    """The strides of each tensor with several dimensions, as text; dimensions of one element are left out."""
    dims = [[(size, stride) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1] for t in sent]
    return sorted({str([stride for _, stride in tensor_dims]) for tensor_dims in dims if len(tensor_dims) > 1})


def _group(args: Any) -> str:
    """The name of the process group, which is the same on all its ranks."""
    name = "?"
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            name = dist.ProcessGroup.unbox(value).group_name
        elif isinstance(value, str):
            name = value  # functional collectives pass the name last, behind that of the reduction
    return name


def _reduction(args: Any) -> str:
    """The number of the ReduceOp as text; "" if there is none."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ReduceOp" in str(value._type()):
            with_op = getattr(value, "op", None)
            return str(with_op() if callable(with_op) else with_op or "")
    return ""


def install_process_group(recorder: Recorder, losses: Losses, pretends: bool) -> None:
    """Hook the functions that open process groups."""
    c10d: Any = dist.distributed_c10d
    init = c10d.init_process_group

    @functools.wraps(init)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        line = where()
        with recorder.during(f"init_process_group at {line}"):
            out = init(backend, *args, **kwargs)
        recorder.rank, recorder.world_size = dist.get_rank(), dist.get_world_size()
        if "accelerate" in sys.modules and os.environ.get(ACCELERATE_ON_CPU) and not pretends:
            message = f"no GPU found; Accelerate ran on the CPU ({ACCELERATE_ON_CPU}=1)"
            recorder.write(Altered(message=message))
        recorder.write(GroupOpened(backend=str(dist.get_backend())))
        return out

    c10d.init_process_group = dist.init_process_group = init_process_group
    for name in ("all_gather", "all_gather_into_tensor", "all_gather_single"):
        if not hasattr(c10d, name):  # new versions of torch have the third name
            continue
        setattr(c10d, name, _gathering(getattr(c10d, name), losses))
        setattr(dist, name, getattr(c10d, name))


def _gathering(function: Any, losses: Losses) -> Any:
    """A wrapper that tracks the result, because no gradient flows through it."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def gather(*args: Any, **kwargs: Any) -> Any:
        work = function(*args, **kwargs)
        out, tensor, *_ = signature.bind(*args, **kwargs).args  # the names of these two differ between functions
        losses.gathers.gather_done(tensor, out, where())
        return work

    return gather
