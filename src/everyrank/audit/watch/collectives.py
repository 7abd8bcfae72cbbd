"""Each collective at the point where torch hands it to its backend: which, of which shapes, from which line.

Everything that the c10d operators carry is seen, also what DDP, fully_shard and DTensor send; not what goes through a
backend's own functions.
"""

# pyright: basic
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

from everyrank.audit.watch.gradients import Gradients
from everyrank.audit.watch.losses import Losses
from everyrank.audit.watch.place import chain, library_calls, where
from everyrank.audit.watch.recorder import ACCELERATE_ON_CPU, Recorder, harmless, tensors

__all__ = ["Collectives", "install_process_group"]

_NUMBER = 8  # bytes
_SHAPES = 4  # of the tensors of one call that are compared
_AS_IN_MEMORY = {"broadcast_", "allreduce_", "reduce_", "scatter_"}  # these send elements in the order of memory


class Collectives(TorchDispatchMode):
    """Writes down each collective that this thread calls."""

    def __init__(self, recorder: Recorder, gradients: Gradients) -> None:
        super().__init__()
        self.recorder, self.gradients = recorder, gradients

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().partition(".")[0].partition("::")[2]
            if "wait_tensor" not in name and "wrap" not in name and not self.recorder.is_muted:
                self._write(name, args)
        elif any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it takes itself apart, and comes again
        return func(*args, **(kwargs or {}))

    @harmless("collectives")
    def _write(self, name: str, args: Any) -> None:
        shapes = [f"{str(t.dtype)[6:]}{list(t.shape)}" for t in itertools.islice(tensors(args), _SHAPES)]
        layouts = _layouts(tensors(args)) if name in _AS_IN_MEMORY else []
        size = sum(t.numel() * t.element_size() for t in tensors(args[:1]))
        about = {"op": name, "group": _group(args), "shapes": shapes, "bytes": size, "reduction": _reduction(args)}
        about |= {"layouts": layouts} if layouts else {}
        recorder = self.recorder
        recorder.num_sent += recorder.update > 0 or recorder.phase.startswith("backward")
        if name == "allreduce_" and recorder.phase == "script" and size <= _NUMBER:
            about |= self._number(args)
            about |= self._result(args)
        recorder.event("collective", **about, lines=chain(), phase=recorder.phase, through=library_calls())

    def _number(self, args: Any) -> dict[str, Any]:
        """A number that the script sends, while gradients stand in .grad: it may be their norm."""
        sent = next(tensors(args), None)
        if sent is None or sent.numel() != 1 or not self.gradients.is_wanted:
            return {}
        with self.recorder.muted():
            return {"value": float(sent), "squares": self.gradients.squares()}

    def _result(self, args: Any) -> dict[str, Any]:
        """A number that is sent in an evaluation: whether it is known to be no mean."""
        sent, losses = next(tensors(args), None), self.gradients.losses
        if sent is None or sent.numel() != 1 or not losses.is_evaluating:
            return {}
        with self.recorder.muted():
            return {"result": {"value": float(sent), **losses.ratios.sent(sent)}}


def _layouts(found: Iterable[Any]) -> list[str]:
    """The strides of each that has more than one dimension, as text; without those of dimensions of one element."""
    sizes = [[(size, step) for size, step in zip(t.shape, t.stride(), strict=True) if size > 1] for t in found]
    return sorted({str([step for _, step in own]) for own in sizes if len(own) > 1})


def _group(args: Any) -> str:
    """The name of the group: by order of creation, so the same on all its ranks."""
    found = "?"
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            found = dist.ProcessGroup.unbox(value).group_name
        elif isinstance(value, str) and found == "?":
            found = value
    return found


def _reduction(args: Any) -> str:
    """SUM, MAX, ... where the operator says so."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ReduceOp" in str(value._type()):
            with_op = getattr(value, "op", None)
            return str(with_op() if callable(with_op) else with_op or "")
    return ""


def install_process_group(recorder: Recorder, losses: Losses, pretends: bool) -> None:
    """Note who opens the process group; where CUDA is pretended gloo stands in for nccl."""
    c10d: Any = dist.distributed_c10d
    init = c10d.init_process_group

    @functools.wraps(init)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        if pretends:
            kwargs.pop("device_id", None)
            backend = "gloo" if backend is None or "nccl" in str(backend) else backend
        line = where()
        with recorder.during(f"init_process_group at {line}"):
            out = init(backend, *args, **kwargs)
        recorder.rank, recorder.world_size = dist.get_rank(), dist.get_world_size()
        if "accelerate" in sys.modules and os.environ.get(ACCELERATE_ON_CPU) and not pretends:
            recorder.event("altered", what=f"no GPU here: Accelerate runs on the CPU ({ACCELERATE_ON_CPU}=1)")
        recorder.event("group", line=line, world_size=recorder.world_size, backend=str(dist.get_backend()))
        return out

    c10d.init_process_group = dist.init_process_group = init_process_group
    for name in ("all_gather", "all_gather_into_tensor", "all_gather_single"):
        if not hasattr(c10d, name):  # the third is the second's name of today
            continue
        setattr(c10d, name, _gathering(getattr(c10d, name), losses))
        setattr(dist, name, getattr(c10d, name))
    if pretends:
        _groups_of_gloo(c10d)
        _average_on_gloo(c10d)


def _gathering(function: Any, losses: Losses) -> Any:
    """These give numbers, and no gradient: whether such numbers go into a loss is looked at later."""

    @functools.wraps(function)
    def gather(out: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        done = function(out, given, *args, **kwargs)
        losses.gathers.gather_done(given, out, where())
        return done

    return gather


def _groups_of_gloo(c10d: Any) -> None:
    """A group that the script asks for with nccl has gloo, and is bound to no device."""
    new_group = c10d.new_group
    signature = inspect.signature(new_group)

    @functools.wraps(new_group)
    def made(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.arguments.pop("device_id", None)
        if "nccl" in str(given.arguments.get("backend")):
            given.arguments["backend"] = "gloo"
        return new_group(*given.args, **given.kwargs)

    c10d.new_group = dist.new_group = made


def _average_on_gloo(c10d: Any) -> None:
    """Gloo has no AVG: the sum, divided."""
    for name, output in _AVERAGED.items():
        function = getattr(c10d, name)
        setattr(c10d, name, _as_sum(function, output))
        setattr(dist, name, getattr(c10d, name))


_AVERAGED = {"all_reduce": "tensor", "reduce": "tensor", "reduce_scatter": "output", "reduce_scatter_tensor": "output"}


def _as_sum(function: Any, output: str) -> Any:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def averaged(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("op") != dist.ReduceOp.AVG or given.arguments.get("async_op"):
            return function(*args, **kwargs)
        given.arguments["op"] = dist.ReduceOp.SUM
        function(*given.args, **given.kwargs)
        given.arguments[output].div_(dist.get_world_size(given.arguments.get("group")))
        return None

    return averaged
