"""A parameter server with plain sends and receives: assignment of parameters to servers, and the messages.

    trainer                                    server
    ask       [ask, 0, 0, 0 ..]        ->      (only asynchronous: a synchronous server knows the order)
    pull      its parameters, flat     <-
    push      [push, sum, count, has]  ->      head: sum and count of the loss; for each parameter whether it has a
              its gradients, flat      ->      gradient; gradients only where the count is not 0

Each message exists once per server. Heads are float64, on CPU; parameters and gradients have the precision of
the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from everyrank.errors import UnsupportedLayoutError
from everyrank.layout import Layout
from everyrank.parallel.ema import WeightEMA
from everyrank.parallel.flat import flatten, pieces
from everyrank.parallel.mesh import Mesh
from everyrank.parallel.zero1 import assign_owners

__all__ = ["ServerLink", "divide"]

_ASK, _PUSH = 0.0, 1.0
# the tag of heads: without it gloo may deliver a message with gradients to a receive from any source
_HEAD = 1
_FIXED = 3  # numbers of a head before the flags


def divide(parameters: Sequence[nn.Parameter], layout: Layout) -> list[list[nn.Parameter]]:
    """Divide the trained parameters over the servers by size: the same on every rank.

    Raises `UnsupportedLayoutError` for more servers than parameters.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if len(trained) < layout.servers:
        raise UnsupportedLayoutError(
            f"layout {layout}: the model has {len(trained)} trained parameters, and a server holds at least one; "
            f"give servers={max(1, len(trained))}"
        )
    owners = assign_owners(trained, layout.servers)
    return [[p for p, owner in zip(trained, owners, strict=True) if owner == s] for s in range(layout.servers)]


@dataclass(frozen=True)
class ServerLink:
    """The messages between servers and trainers. Ranks are those of the world: servers first.

    parts   the parameters of each server
    """

    mesh: Mesh
    parts: Sequence[Sequence[nn.Parameter]]

    @property
    def server_parameters(self) -> Sequence[nn.Parameter]:
        """The parameters of this server."""
        return self.parts[self.mesh.world.rank]

    @property
    def trainers(self) -> range:
        """The ranks that train."""
        return range(self.mesh.servers, self.mesh.world.size)

    # --- methods for trainers

    @torch.no_grad()
    def pull(self, asks: bool = False) -> None:
        """Receive the parameters of every server into the model; `asks` sends a request first."""
        sent = self._send_all([self._head(parameters, _ASK) for parameters in self.parts], _HEAD) if asks else []
        flats = [_flat(parameters) for parameters in self.parts]
        group = self.mesh.world.group
        waiting = [dist.irecv(flat, src=server, group=group) for server, flat in enumerate(flats)]
        for work, flat, parameters in zip(waiting, flats, self.parts, strict=True):
            _wait(work)
            for parameter, values in zip(parameters, pieces(flat, parameters), strict=True):
                parameter.copy_(values)
        _wait(*sent)

    def push(self, share: Tensor) -> None:
        """Send every server (sum, count) of this trainer's loss, and the gradients of its part.

        All messages are sent at once. Servers serve trainers in different orders, and a server that has received a head
        waits for its gradients. Sending gradients only after all heads are received could therefore deadlock.
        """
        share = share.cpu()  # servers read it on CPU; on CUDA this is the only synchronisation of an update
        heads = [self._head(parameters, _PUSH, share) for parameters in self.parts]
        numbers = [_flat_gradients(parameters) for parameters in self.parts] if float(share[1]) else []
        _wait(*self._send_all(heads, _HEAD), *self._send_all(numbers))

    def receive_total(self) -> Tensor:
        """Receive (sum, count) over all trainers from the first server: float64, shape (2,)."""
        total = torch.zeros(2, dtype=torch.float64, device=self.mesh.world.device)
        dist.recv(total, src=0, group=self.mesh.world.group)
        return total

    # --- methods for servers

    def give(self, *trainers: int) -> None:
        """Send this server's parameters to trainers."""
        flat = flatten([parameter.detach() for parameter in self.server_parameters])
        _wait(*(dist.isend(flat, dst=trainer, group=self.mesh.world.group) for trainer in trainers))

    def receive_header(self, trainer: int | None) -> tuple[int, Tensor | None]:
        """Receive (trainer, its (sum, count) and flags, or None for a request), from one trainer or the first one."""
        head = self._head(self.server_parameters, _ASK)
        sender = dist.recv(head, src=trainer, group=self.mesh.world.group, tag=_HEAD)
        return sender, (head[1:] if float(head[0]) == _PUSH else None)

    @torch.no_grad()
    def add_gradients(self, trainer: int, head: Tensor) -> None:
        """Receive a trainer's gradients and add them to the sum."""
        if not float(head[1]):
            return
        flat = _flat(self.server_parameters)
        dist.recv(flat, src=trainer, group=self.mesh.world.group)
        flags = head[2:].tolist()
        for parameter, values, has_gradient in zip(
            self.server_parameters, pieces(flat, self.server_parameters), flags, strict=True
        ):
            if has_gradient:
                parameter.grad = values if parameter.grad is None else parameter.grad.add_(values)

    def tell_total(self, total: Tensor) -> None:
        """Send (sum, count) over all trainers to each of them; only on the first server."""
        if self.mesh.world.rank == 0:
            _wait(*(dist.isend(total, dst=trainer, group=self.mesh.world.group) for trainer in self.trainers))

    def sum_squares(self) -> Tensor:
        """Return the sum of squares of all gradients over all servers: float64, shape ()."""
        rank, group = self.mesh.world.rank, self.mesh.world.group
        rows = torch.zeros(self.mesh.servers, dtype=torch.float64, device=self.mesh.world.device)
        for parameter in self.server_parameters:
            if parameter.grad is not None:
                rows[rank] += torch.linalg.vector_norm(parameter.grad).double().square()
        others = [server for server in range(self.mesh.servers) if server != rank]
        waiting = [dist.isend(rows[rank : rank + 1].clone(), dst=other, group=group) for other in others]
        for other in others:
            dist.recv(rows[other : other + 1], src=other, group=group)
        _wait(*waiting)
        return rows.sum()

    # --- methods for all ranks

    @torch.no_grad()
    def gather_for_eval(self, model: nn.Module, ema: WeightEMA | None) -> None:
        """Broadcast the servers' parameters and averages, and the buffers of the first trainer. A collective."""
        averages = dict(zip(ema.parameters, ema.tensors, strict=True)) if ema is not None else {}
        for server, parameters in enumerate(self.parts):
            for parameter in parameters:
                self._broadcast(parameter, server)
                if ema is not None:
                    self._broadcast(averages[parameter], server)
        for buffer in model.buffers():
            self._broadcast(buffer, self.mesh.servers)

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, src=source, group=self.mesh.world.group)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)

    def _head(self, parameters: Sequence[nn.Parameter], kind: float, share: Tensor | None = None) -> Tensor:
        # on CPU under every device: a server reads it at once, and nccl cannot receive from any source
        head = torch.zeros(_FIXED + len(parameters), dtype=torch.float64)
        head[0] = kind
        if share is not None:
            head[1:_FIXED] = share
            head[_FIXED:] = torch.tensor([parameter.grad is not None for parameter in parameters])
        return head

    def _send_all(self, messages: Sequence[Tensor], tag: int = 0) -> list[dist.Work | None]:
        """Send one message to each server. Returns the works to wait for."""
        group = self.mesh.world.group
        return [dist.isend(message, dst=server, group=group, tag=tag) for server, message in enumerate(messages)]


def _flat(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Allocate a flat tensor for these parameters."""
    return parameters[0].new_empty(sum(parameter.numel() for parameter in parameters)).detach()


def _flat_gradients(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Flatten the gradients; zeros for a missing one."""
    return flatten(
        [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
    )


def _wait(*works: dist.Work | None) -> None:
    for work in works:
        if work is not None:
            work.wait()
