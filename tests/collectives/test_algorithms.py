"""All-reduce algorithms made of sends and receives: the sum, and the traffic that theory predicts."""

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


class ThreadMessages(Messages):
    """Messages between threads of one process, so many ranks start quickly."""

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
        return ThreadMessages(
            places.index(self.rank), [self.ranks[index] for index in places], self.group, self.traffic
        )

    def _put(self, tensor: Tensor, to: int) -> None:
        self._count(tensor)
        self._box(self.ranks[self.rank], self.ranks[to]).put(tensor.clone())

    def _box(self, source: int, to: int) -> Any:
        return self.group.setdefault((source, to), queue.Queue())  # pyright: ignore


def rank_values(rank: int, length: int) -> Tensor:
    """Return the local tensor of a rank."""
    return torch.arange(length, dtype=torch.float64) * (rank + 1) + rank


def all_reduce_in_threads(name: str, size: int, length: int) -> tuple[list[Tensor], list[Traffic]]:
    """Run an all-reduce with one thread for each rank. Return the tensors and the traffic of all ranks."""
    boxes: Any = {}
    tensors = [rank_values(rank, length) for rank in range(size)]
    links = [ThreadMessages(rank, range(size), boxes) for rank in range(size)]
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
def test_all_reduce_is_exact_and_has_the_predicted_traffic(name: str, size: int) -> None:
    """The sum is bitwise equal on every rank. Steps and elements of each rank equal the prediction."""
    for length in LENGTHS:
        tensors, traffic = all_reduce_in_threads(name, size, length)
        expected = torch.stack([rank_values(rank, length) for rank in range(size)]).sum(0)
        for tensor in tensors:
            assert torch.equal(tensor, expected), (length, tensor, expected)
        predicted = [ALGORITHMS[name].traffic(rank, size, length) for rank in range(size)]
        assert traffic == predicted, length


def test_predicted_traffic_of_four_ranks() -> None:
    """A ring sends 2 (N - 1) / N of the tensor in 2 (N - 1) steps. Rank 0 of a server sends N - 1 times the tensor."""
    assert ALGORITHMS["ring"].traffic(0, 4, 100) == Traffic(6, 150)
    assert ALGORITHMS["halving"].traffic(0, 4, 100) == Traffic(4, 150)
    assert ALGORITHMS["server"].traffic(0, 4, 100) == Traffic(6, 300)
    assert ALGORITHMS["tree"].traffic(3, 4, 100) == Traffic(2, 100)


def max_errors_over_gloo(world: Any, name: str) -> list[float]:
    """Return the largest error of an all-reduce of 1 and of 1000 elements."""
    max_errors = []
    for length in (1, 1000):
        tensor = rank_values(world.rank, length)
        ALGORITHMS[name].all_reduce(tensor, Messages(world.rank, range(world.size), world.group))
        expected = torch.stack([rank_values(rank, length) for rank in range(world.size)]).sum(0)
        max_errors.append(float((tensor - expected).abs().max()))
    return max_errors


@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_reduce_over_gloo_is_exact(ranks: Any, name: str) -> None:
    """The ranks are three processes."""
    assert ranks(3, max_errors_over_gloo, name) == [[0.0, 0.0]] * 3
