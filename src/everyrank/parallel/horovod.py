"""What Horovod does in a training: rank 0's state sent to all, and an optimizer whose gradients are summed on the way.

`hvd` is the module `horovod.torch`, initialised (`world.start_horovod`). Its optimizer puts a hook on each parameter:
in the last backward of an update a gradient goes to Horovod's thread as soon as it is there, and that thread sends
together what is ready on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everyrank.backends import observe_call, recorded
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

_GROUP = "horovod"  # in what is counted, in place of the name of a process group


class CountingCompressor:
    """Horovod's compressor, as which every gradient passes right before it is sent: what passes is counted."""

    def __init__(self, compressor: Any) -> None:
        self.compressor = compressor

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """(what is sent, what `decompress` needs)."""
        sent, context = self.compressor.compress(tensor)
        observe_call("all_reduce", _GROUP, [sent])
        return sent, context

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        """The sum over all ranks, in the dtype of the gradient."""
        return self.compressor.decompress(tensor, context)


class HorovodSum:
    """The sum of a small tensor over all ranks, which travels while this rank goes on.

    `name`  the same on all ranks: Horovod brings together what has the same name, in whatever order it comes
    """

    def __init__(self, hvd: Any, tensor: Tensor, name: str, world: World) -> None:
        self.hvd, self.world = hvd, world
        observe_call("all_reduce", _GROUP, [tensor])
        self.handle: int = hvd.allreduce_async(tensor, name=name, op=hvd.Sum)

    def wait(self) -> Tensor:
        """The sum; a tensor of its own. Raises `RankFailedError` after the timeout."""
        with recorded("horovod", "all_reduce"):
            wait_for_horovod(self.hvd, [self.handle], self.world)
            return self.hvd.synchronize(self.handle)


def broadcast_model(hvd: Any, model: nn.Module, world: World) -> None:
    """Start every rank from rank 0's parameters and buffers. Raises `CannotRunError` for what Horovod cannot send."""
    named = [*model.named_parameters(), *model.named_buffers()]
    _broadcast(hvd, [(f"model/{name}", tensor.detach()) for name, tensor in named], world)


def broadcast_optimizer(hvd: Any, optimizer: Optimizer, world: World) -> None:
    """Go on everywhere with the state of rank 0's optimizer, once a checkpoint has been read; nothing where none has.

    Not by `hvd.broadcast_optimizer_state`: where the state is empty that makes a step with gradients of zero to fill
    it, which decays weights and counts as a first step of Adam; and what is no tensor it sends pickled.
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
    """What `hvd.broadcast_parameters` does, with an end to the wait."""
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
    """Horovod's optimizer in place of a person's: `synchronize()` waits for the sums of all gradients.

    The sum, not the average: ranks of a ragged batch have different numbers of terms, and an average of their means
    would weigh them alike. Of `num_micro_batches` backwards the last one sends.

    Horovod makes an object of a class of its own from the parameter groups alone. Raises `UnsupportedLayoutError`
    where the person's optimizer keeps anything elsewhere, which would be lost without a word.
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
    """Raise `WorkloadError` for a parameter without a gradient: Horovod would make it zeros, and the step decay it."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            raise WorkloadError(f"layout horovod: parameter {name} took no part in the loss; freeze it, or use ddp")


def wait_for_gradients(hvd: Any, optimizer: Any, world: World) -> None:
    """Until every gradient is the sum over all ranks. Raises `RankFailedError` after the timeout."""
    with recorded("horovod", "all_reduce"):
        on_their_way = [handle for handle, _ in optimizer._handles.values()]
        wait_for_horovod(hvd, [handle for handle in on_their_way if isinstance(handle, int)], world)
        optimizer.synchronize()


def sum_untrained_grads(hvd: Any, model: nn.Module, optimizer: Optimizer, world: World) -> None:
    """Sum the gradients that the optimizer, and so Horovod, does not know: they count in the norm that is clipped."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and id(parameter) not in trained:
            parameter.grad = HorovodSum(hvd, parameter.grad, name, world).wait()
