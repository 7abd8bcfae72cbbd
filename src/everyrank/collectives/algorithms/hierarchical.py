"""All-reduce inside each host, then across hosts: the slow links between hosts carry one tensor for each host.

Two hosts of three ranks each; the first of a host is its leader:

    1. inside     1, 2 -> 0              4, 5 -> 3              the leader adds up what its host has
    2. across             0 <- ring -> 3                        leaders alone: a ring over the hosts
    3. inside     0 -> 1, 2              3 -> 4, 5              the total comes back

Between hosts travels what a ring of as many ranks as there are hosts needs, not one of all ranks.
Source: Ueno and Yokota 2019, Exhaustive study of hierarchical allreduce patterns for large messages between GPUs.
"""

from __future__ import annotations

from torch import Tensor

from everyrank.collectives.algorithms.ring import ring_all_reduce, ring_traffic
from everyrank.collectives.algorithms.server import server_traffic
from everyrank.collectives.links import Links, Traffic

__all__ = ["hierarchical_all_reduce", "hierarchical_traffic"]


def hierarchical_all_reduce(tensor: Tensor, links: Links, ranks_per_host: int = 2) -> None:
    """Replace `tensor`, shape (length,), by its sum over the ranks; the last host may have fewer ranks."""
    hosts = _hosts(links.size, ranks_per_host)
    own = next(host for host in hosts if links.rank in host)
    inside = links.among(own)
    if inside.rank != 0:
        inside.send(tensor, 0)
        inside.receive(tensor, 0)
        return
    received = tensor.new_empty(len(tensor))
    for member in range(1, inside.size):
        inside.receive(received, member)
        tensor += received
    ring_all_reduce(tensor, links.among([host[0] for host in hosts]))
    for member in range(1, inside.size):
        inside.send(tensor, member)


def _hosts(size: int, ranks_per_host: int) -> list[range]:
    return [range(first, min(first + ranks_per_host, size)) for first in range(0, size, ranks_per_host)]


def hierarchical_traffic(rank: int, size: int, length: int, ranks_per_host: int = 2) -> Traffic:
    """What the theory says of one rank: steps, and elements sent."""
    hosts = _hosts(size, ranks_per_host)
    place, own = next((place, host) for place, host in enumerate(hosts) if rank in host)
    inside = server_traffic(rank - own[0], len(own), length)
    across = ring_traffic(place, len(hosts), length) if rank == own[0] else Traffic()
    return Traffic(inside.num_steps + across.num_steps, inside.num_elements + across.num_elements)
