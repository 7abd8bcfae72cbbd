"""All-reduce in plain sends and receives: right for any number of ranks and any length, with the theory's traffic."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from everyrank.collectives.algorithms import ALGORITHMS
from everyrank.collectives.messages import Messages, Traffic

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13]
LENGTHS = [0, 1, 2, 7, 16, 31]


class Threads(Messages):
    """Messages between the threads of one process: many ranks in no time."""

    boxes: dict[tuple[int, int], Any]

    def send(self, tensor: Tensor, to: int) -> None:
        self.traffic.num_steps += 1
        self._put(tensor, to)

    def receive(self, tensor: Tensor, source: int) -> None:
        self.traffic.num_steps += 1
        tensor.copy_(self._box(self.ranks[source], self.ranks[self.rank]).get(timeout=30))

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> None:
        self.traffic.num_steps += 1
        self._put(outgoing, to)
        incoming.copy_(self._box(self.ranks[source], self.ranks[self.rank]).get(timeout=30))

    def among(self, places: Any) -> Messages:
        return Threads(places.index(self.rank), [self.ranks[place] for place in places], self.group, self.traffic)

    def _put(self, tensor: Tensor, to: int) -> None:
        self._count(tensor)
        self._box(self.ranks[self.rank], self.ranks[to]).put(tensor.clone())

    def _box(self, source: int, to: int) -> Any:
        return self.group.setdefault((source, to), queue.Queue())  # pyright: ignore


def own_values(rank: int, length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float64) * (rank + 1) + rank


def in_threads(name: str, size: int, length: int) -> tuple[list[Tensor], list[Traffic]]:
    boxes: Any = {}
    tensors = [own_values(rank, length) for rank in range(size)]
    links = [Threads(rank, range(size), boxes) for rank in range(size)]
    threads = [
        threading.Thread(target=ALGORITHMS[name].all_reduce, args=(tensor, link), daemon=True)
        for tensor, link in zip(tensors, links, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return tensors, [link.traffic for link in links]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_sum_and_traffic(name: str, size: int) -> None:
    """The sum on every rank, to the last bit; steps and elements of each rank as the theory has them."""
    for length in LENGTHS:
        tensors, traffic = in_threads(name, size, length)
        expected = torch.stack([own_values(rank, length) for rank in range(size)]).sum(0)
        for tensor in tensors:
            assert torch.equal(tensor, expected), (length, tensor, expected)
        theory = [ALGORITHMS[name].traffic(rank, size, length) for rank in range(size)]
        assert traffic == theory, length


def test_theory_of_the_ring() -> None:
    """2 (N - 1) / N of the tensor, in 2 (N - 1) steps; the server's rank 0 sends N - 1 times all of it."""
    assert ALGORITHMS["ring"].traffic(0, 4, 100) == Traffic(6, 150)
    assert ALGORITHMS["halving"].traffic(0, 4, 100) == Traffic(4, 150)
    assert ALGORITHMS["server"].traffic(0, 4, 100) == Traffic(6, 300)
    assert ALGORITHMS["tree"].traffic(3, 4, 100) == Traffic(2, 100)


def over_gloo(world: Any, name: str) -> list[float]:
    found = []
    for length in (1, 1000):
        tensor = own_values(world.rank, length)
        ALGORITHMS[name].all_reduce(tensor, Messages(world.rank, range(world.size), world.group))
        expected = torch.stack([own_values(rank, length) for rank in range(world.size)]).sum(0)
        found.append(float((tensor - expected).abs().max()))
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
def test_between_processes(ranks: Any, name: str) -> None:
    """The same over gloo, on three ranks."""
    assert ranks(3, over_gloo, name) == [[0.0, 0.0]] * 3
