"""What stands in while an update is replayed: for the other ranks, for dropout, and for what batch norm looks at."""

# pyright: basic
from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from everyrank.audit.watch.kept import ReplayError, State
from everyrank.audit.watch.losses import DROPOUTS

__all__ = ["SendsError", "StandIn", "as_world_of", "undisturbed"]

_SENDING = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce_scatter", "broadcast"),
    *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "reduce", "gather", "scatter", "barrier"),
    *("send", "recv", "isend", "irecv", "broadcast_object_list", "_all_gather_base"),
    *("all_gather_single", "reduce_scatter_single", "gather_single"),  # torch 2.13, 2.13 and 2.14 have these
)


class SendsError(Exception):
    """The model calls a collective in its forward."""


@contextlib.contextmanager
def undisturbed(root: Any, state: State) -> Generator[None]:
    """What is set for the replay is put back after it."""
    modules = list(root.modules())
    before = [module.training for module in modules], torch.get_default_dtype(), torch.is_grad_enabled()
    devices = [parameter.device for parameter in root.parameters() if parameter.device.type == "cuda"][:1]
    try:
        with torch.random.fork_rng(devices):
            for module, is_training in zip(modules, state.are_training, strict=True):
                module.training = is_training
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(True)
            yield
    finally:
        for module, is_training in zip(modules, before[0], strict=True):
            module.training = is_training
        torch.set_default_dtype(before[1])
        torch.set_grad_enabled(before[2])


class StandIn(TorchFunctionMode):
    """Counts batch norms over a batch, or makes them look at segments of it; can leave dropout out."""

    def __init__(self) -> None:
        super().__init__()
        self.num_norms, self.has_drawn, self.drops = 0, False, False
        self.segments: list[int] | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in DROPOUTS and self.drops:
            return args[0] if args else kwargs["input"]
        if func is F.batch_norm and _normalises_over_batch(args, kwargs):
            self.num_norms += 1
            if self.segments is not None:
                times, rest = divmod(len(args[0]), sum(self.segments))
                if rest:
                    raise ReplayError("batch norm over rows that are not samples")
                parts = args[0].split([size * times for size in self.segments])
                return torch.cat([func(part, *args[1:], **kwargs) for part in parts])
        return func(*args, **kwargs)


def _normalises_over_batch(args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("training", args[5] if len(args) > 5 else False))


class _NothingSent(TorchDispatchMode):
    """Stops what would be sent in a way that `as_world_of` does not know."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            raise SendsError
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def as_world_of(size: int) -> Generator[None]:
    """So many ranks are said to be there. In a world of one an all-reduce is no change; nothing is ever sent."""

    def sent(*_args: Any, **_kwargs: Any) -> Any:
        raise SendsError

    def stays(_tensor: Any, _op: Any = None, _group: Any = None, async_op: bool = False, **_kwargs: Any) -> None:
        if async_op:
            raise SendsError

    answers = {name: stays if size == 1 and name == "all_reduce" else sent for name in _SENDING}
    answers |= {"get_world_size": lambda *_, **__: size, "get_rank": lambda *_, **__: 0}
    with _replaced(dist, answers), _replaced(dist.distributed_c10d, answers), _NothingSent():
        yield


@contextlib.contextmanager
def _replaced(place: Any, answers: dict[str, Any]) -> Generator[None]:
    """Functions of a module, by name, as long as the block lasts."""
    before = {name: getattr(place, name) for name in answers if hasattr(place, name)}
    try:
        for name in before:
            setattr(place, name, answers[name])
        yield
    finally:
        for name, function in before.items():
            setattr(place, name, function)
