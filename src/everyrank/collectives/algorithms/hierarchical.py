"""All-reduce within each host, then between hosts: the slow network carries one tensor for each host.

Two hosts of three ranks each; the first rank of a host is its leader:

    1. inside     1, 2 -> 0              4, 5 -> 3              the leader adds up the tensors of its host
    2. across             0 <- ring -> 3                        leaders only: a ring over the hosts
    3. inside     0 -> 1, 2              3 -> 4, 5              leaders send the total

Between hosts, the communication is that of a ring with one rank per host.
Source: Ueno and Yokota 2019, Exhaustive study of hierarchical allreduce patterns for large messages between GPUs.
"""

from __future__ import annotations

from torch import Tensor

from everyrank.collectives.algorithms.ring import ring_all_reduce, ring_traffic
from everyrank.collectives.algorithms.server import server_traffic
from everyrank.collectives.messages import Messages, Traffic

__all__ = ["hierarchical_all_reduce", "hierarchical_traffic"]


def hierarchical_all_reduce(tensor: Tensor, messages: Messages, ranks_per_host: int = 2) -> None:
    """Replace `tensor`, shape (length,), by its sum over the ranks; the last host may have fewer ranks."""
    hosts = _hosts(messages.size, ranks_per_host)
    local_ranks = next(host for host in hosts if messages.rank in host)
    inside = messages.among(local_ranks)
    if inside.rank != 0:
        inside.send(tensor, 0)
        inside.receive(tensor, 0)
        return
    received = tensor.new_empty(len(tensor))
    for member in range(1, inside.size):
        inside.receive(received, member)
        tensor += received
    ring_all_reduce(tensor, messages.among([host[0] for host in hosts]))
    for member in range(1, inside.size):
        inside.send(tensor, member)


def _hosts(size: int, ranks_per_host: int) -> list[range]:
    return [range(first, min(first + ranks_per_host, size)) for first in range(0, size, ranks_per_host)]


def hierarchical_traffic(rank: int, size: int, length: int, ranks_per_host: int = 2) -> Traffic:
    """Return the steps and the sent elements of one rank, by the theory of the algorithm."""
    hosts = _hosts(size, ranks_per_host)
    host_index, local_ranks = next((host_index, host) for host_index, host in enumerate(hosts) if rank in host)
    inside = server_traffic(rank - local_ranks[0], len(local_ranks), length)
    across = ring_traffic(host_index, len(hosts), length) if rank == local_ranks[0] else Traffic()
    return Traffic(inside.num_steps + across.num_steps, inside.num_elements + across.num_elements)
