"""What ranks of several hosts hear of each other: two of them in this process, over a store."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest
import torch.distributed as dist

import everyrank.world.heartbeat as heartbeat
from everyrank.world.heartbeat import PeerMonitor

LONG = 60.0  # seconds, on a machine however busy
HOSTS = ("a", "b")


class Pair:
    """Two ranks, and what each was ended with."""

    def __init__(self) -> None:
        self.store = store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(2):
            store.add(f"beat/{rank}", 0)
        self.ended: list[queue.Queue[BaseException]] = [queue.Queue(), queue.Queue()]
        self.ranks = [PeerMonitor(store, rank, HOSTS, 300.0, self.ended[rank].put) for rank in range(2)]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    for name, seconds in {"_BEAT_SECONDS": 0.05, "_REPORTED_SECONDS": 0.5}.items():
        monkeypatch.setattr(heartbeat, name, seconds)
    made = Pair()
    yield made
    for rank in made.ranks:
        rank.end()
        for thread in rank.threads:
            thread.join(LONG)


def test_rank_in_a_kernel_hears_of_a_failure(pair: Pair) -> None:
    """It waits in nccl, where nothing breaks when a peer ends: it ends with that one's words, and not by a watchdog."""
    pair.ranks[1].report(ValueError("boom"))
    error = pair.ended[0].get(timeout=LONG)
    assert str(error) == "rank 1 of 2 on b: ValueError: boom"
    assert pair.ended[1].empty(), "who has failed ends by itself"


def test_rank_that_meets_its_own_end_is_left_alone(pair: Pair) -> None:
    """gloo's connections break: the main thread has its own error, asks whose fault it was, and goes."""
    pair.ranks[1].report(ValueError("boom"))
    error = pair.ranks[0].find_first_failure()
    assert str(error) == "rank 1 of 2 on b: ValueError: boom"
    pair.ranks[0].end()
    for thread in pair.ranks[0].threads:
        thread.join(LONG)
    assert pair.ended[0].empty()
