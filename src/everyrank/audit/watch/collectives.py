"""Records each collective that torch passes to a backend: operation, shapes and line.

This includes all c10d operators, also those of DDP, fully_shard and DTensor, but not direct calls of a backend.
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
from everyrank.audit.watch.recorder import ACCELERATE_ON_CPU, Recorder, harmless, tensors
from everyrank.audit.watch.source_location import library_calls, user_line, user_lines

__all__ = ["CollectiveMode", "install_process_group"]

_MAX_NUMBER_BYTES = 8
_MAX_SHAPES = 4  # tensors of a call whose shapes are compared
_SENT_IN_MEMORY_ORDER = {"broadcast_", "allreduce_", "reduce_", "scatter_"}


class CollectiveMode(TorchDispatchMode):
    """Records each collective that this thread calls."""

    supports_higher_order_operators = True  # torch refuses flex_attention and torch.cond under any other mode

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
        shapes = [f"{str(t.dtype)[6:]}{list(t.shape)}" for t in itertools.islice(tensors(args), _MAX_SHAPES)]
        size = sum(t.numel() * t.element_size() for t in tensors(args[:1]))
        recorder = self.recorder
        recorder.num_collectives += recorder.update > 0 or recorder.phase.startswith("backward")
        number = next(tensors(args), None) if name == "allreduce_" and recorder.phase == "script" else None
        number = number if number is not None and number.numel() == 1 and size <= _MAX_NUMBER_BYTES else None
        value, squares = self._gradient_norm(number)
        recorder.write(
            CollectiveCall(
                op=name,
                group=_group(args),
                shapes=shapes,
                num_bytes=size,
                reduction=_reduction(args),
                strides=_strides(tensors(args)) if name in _SENT_IN_MEMORY_ORDER else [],
                lines=user_lines(),
                phase=recorder.phase,
                library_calls=library_calls(),
                value=value,
                squares=squares,
                result=self._result(number),
            )
        )

    def _gradient_norm(self, number: Any) -> tuple[float | None, dict[str, float]]:
        """A number that the script reduces while there are gradients, which may be their norm, and their squares."""
        if number is None or not self.gradients.is_wanted:
            return None, {}
        with self.recorder.muted():
            return float(number), self.gradients.squares()

    def _result(self, number: Any) -> ReduceResult | None:
        """The number that the script reduces in an evaluation; None outside of evaluations."""
        losses = self.gradients.losses
        if number is None or not losses.is_evaluating:
            return None
        with self.recorder.muted():
            return losses.ratios.result_of(number)


def _strides(tensors_sent: Iterable[Any]) -> list[str]:
    """The strides of each tensor with several dimensions, as text. Dimensions of size 1 are left out."""
    dims = [
        [(size, stride) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1] for t in tensors_sent
    ]
    return sorted({str([stride for _, stride in tensor_dims]) for tensor_dims in dims if len(tensor_dims) > 1})


def _group(args: Any) -> str:
    """The name of the process group, which is the same on all its ranks."""
    name = "?"
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            name = dist.ProcessGroup.unbox(value).group_name
        elif isinstance(value, str):
            name = value  # functional collectives pass the group's name last, after the name of the reduction
    return name


def _reduction(args: Any) -> str:
    """The number of the ReduceOp as text; "" if there is none."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ReduceOp" in str(value._type()):
            op = getattr(value, "op", None)
            return str(op() if callable(op) else op or "")
    return ""


def install_process_group(recorder: Recorder, losses: Losses, pretends_cuda: bool) -> None:
    """Hook the functions that create process groups, and those that gather tensors."""
    c10d: Any = dist.distributed_c10d
    init = c10d.init_process_group

    @functools.wraps(init)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        line = user_line()
        with recorder.during(f"init_process_group at {line}"):
            out = init(backend, *args, **kwargs)
        recorder.rank, recorder.world_size = dist.get_rank(), dist.get_world_size()
        if "accelerate" in sys.modules and os.environ.get(ACCELERATE_ON_CPU) and not pretends_cuda:
            message = f"no GPU found; Accelerate ran on the CPU ({ACCELERATE_ON_CPU}=1)"
            recorder.write(Altered(message=message))
        recorder.write(GroupOpened(backend=str(dist.get_backend())))
        return out

    c10d.init_process_group = dist.init_process_group = init_process_group
    for name in ("all_gather", "all_gather_into_tensor", "all_gather_single"):
        if not hasattr(c10d, name):  # new versions of torch have the third name
            continue
        setattr(c10d, name, _with_gather_tracking(getattr(c10d, name), losses))
        setattr(dist, name, getattr(c10d, name))


def _with_gather_tracking(function: Any, losses: Losses) -> Any:
    """Wrap an all_gather to track its result, because no gradient flows through it."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def gather(*args: Any, **kwargs: Any) -> Any:
        work = function(*args, **kwargs)
        out, tensor, *_ = signature.bind(*args, **kwargs).args  # the names of these two differ between functions
        losses.gathers.add_gather(tensor, out, user_line())
        return work

    return gather
