"""Horovod's training mechanisms: broadcast of rank 0's state, and an optimizer that sums gradients.

`hvd` is the module `horovod.torch`, initialised by `world.start_horovod`. Its optimizer hooks each parameter. In the
last backward of an update, each gradient is passed to Horovod's thread, which reduces those that are ready on all
ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everyrank.backends import observe_call, profiler_range
from everyrank.errors import CannotRunError, UnsupportedLayoutError, WorkloadError
from everyrank.world import World, wait_for_horovod

__all__ = [
    "HorovodSum",
    "broadcast_model",
    "broadcast_optimizer",
    "check_every_gradient",
    "distributed_optimizer",
    "sum_untrained_grads",
    "wait_for_gradients",
]

_GROUP = "horovod"  # group name in the counted communication


class CountingCompressor:
    """Horovod's compressor, which every gradient passes before it is sent; it counts the traffic."""

    def __init__(self, compressor: Any) -> None:
        self.compressor = compressor

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return (the tensor to send, the context for `decompress`)."""
        sent, context = self.compressor.compress(tensor)
        observe_call("all_reduce", _GROUP, [sent])
        return sent, context

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        """Cast the sum over all ranks to the dtype of the gradient."""
        return self.compressor.decompress(tensor, context)


class HorovodSum:
    """An asynchronous sum of a small tensor over all ranks.

    `name`  must be the same on all ranks: Horovod matches tensors by name, in any order
    """

    def __init__(self, hvd: Any, tensor: Tensor, name: str, world: World) -> None:
        self.hvd, self.world = hvd, world
        observe_call("all_reduce", _GROUP, [tensor])
        self.handle: int = hvd.allreduce_async(tensor, name=name, op=hvd.Sum)

    def wait(self) -> Tensor:
        """Return the sum as a new tensor. Raises `RankFailedError` after the timeout."""
        with profiler_range("horovod", "all_reduce"):
            wait_for_horovod(self.hvd, [self.handle], self.world)
            return self.hvd.synchronize(self.handle)


def broadcast_model(hvd: Any, model: nn.Module, world: World) -> None:
    """Broadcast parameters and buffers of rank 0. Raises `CannotRunError` for dtypes that Horovod cannot send."""
    named = [*model.named_parameters(), *model.named_buffers()]
    _broadcast(hvd, [(f"model/{name}", tensor.detach()) for name, tensor in named], world)


def broadcast_optimizer(hvd: Any, optimizer: Optimizer, world: World) -> None:
    """Broadcast rank 0's optimizer state after a checkpoint was loaded; does nothing without one.

    `hvd.broadcast_optimizer_state` is not used: it fills empty state by a step with zero gradients, which applies
    weight decay and counts as a step of Adam, and it pickles values that are not tensors.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    named = [
        (f"optimizer/{index}/{key}", value)
        for index, parameter in enumerate(parameters)
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor)
    ]
    _broadcast(hvd, named, world)


def _broadcast(hvd: Any, named: list[tuple[str, Tensor]], world: World) -> None:
    """The same as `hvd.broadcast_parameters`, with a timeout."""
    for name, tensor in named:
        if tensor.dtype in (torch.bfloat16, torch.complex64, torch.complex128):
            raise CannotRunError(f"layout horovod: {name} is {tensor.dtype}, which Horovod cannot send; use ddp")
        observe_call("broadcast", _GROUP, [tensor])
    handles: list[int] = [hvd.broadcast_async_(tensor, 0, name=name) for name, tensor in named]
    wait_for_horovod(hvd, handles, world)
    for handle in handles:
        hvd.synchronize(handle)


def distributed_optimizer(
    hvd: Any, optimizer: Optimizer, model: nn.Module, num_micro_batches: int, compress: str
) -> Any:
    """Wrap the user's optimizer in Horovod's: `synchronize()` waits for the sums of all gradients.

    It sums instead of averaging: with an uneven last batch, ranks have different numbers of terms, and an average of
    their means would be wrong. Only the last of `num_micro_batches` backwards sends.

    Horovod builds its own class from the parameter groups only. Raises `UnsupportedLayoutError` if the user's optimizer
    keeps state elsewhere, which would be lost.
    """
    kind = type(optimizer).__name__
    try:
        wrapped = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=list(model.named_parameters()),
            compression=CountingCompressor(getattr(hvd.Compression, compress)),
            backward_passes_per_step=num_micro_batches,
            op=hvd.Sum,
        )
    except TypeError as error:
        raise UnsupportedLayoutError(
            f"layout horovod: it makes {kind} anew from its parameter groups, and {error}; use ddp"
        ) from error
    for name, value in vars(optimizer).items():
        plain = isinstance(value, bool | int | float | str) and not name.startswith("_")
        if plain and vars(wrapped).get(name) != value:
            raise UnsupportedLayoutError(
                f"layout horovod: it makes {kind} anew from its parameter groups, and {name}={value} is not in them; "
                "use ddp"
            )
    return wrapped


def check_every_gradient(model: nn.Module) -> None:
    """Raise `WorkloadError` for a parameter without a gradient: Horovod would use zeros, and the step apply weight
    decay.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            raise WorkloadError(f"layout horovod: parameter {name} took no part in the loss; freeze it, or use ddp")


def wait_for_gradients(hvd: Any, optimizer: Any, world: World) -> None:
    """Wait until every gradient is the sum over all ranks. Raises `RankFailedError` after the timeout."""
    with profiler_range("horovod", "all_reduce"):
        on_their_way = [handle for handle, _ in optimizer._handles.values()]
        wait_for_horovod(hvd, [handle for handle in on_their_way if isinstance(handle, int)], world)
        optimizer.synchronize()


def sum_untrained_grads(hvd: Any, model: nn.Module, optimizer: Optimizer, world: World) -> None:
    """Sum gradients of parameters that the optimizer does not have: they count in the clipping norm."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and id(parameter) not in trained:
            parameter.grad = HorovodSum(hvd, parameter.grad, name, world).wait()
