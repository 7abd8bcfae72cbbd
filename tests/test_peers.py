"""PeerMonitor: ranks on several hosts learn of each other's failures. Two ranks in this process share a store."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import everyrank.world.heartbeat as heartbeat
from everyrank.world.heartbeat import PeerMonitor

TIMEOUT_SECONDS = 60.0  # seconds; enough for a busy machine
HOSTS = ("a", "b")


class Pair:
    """Two ranks with a PeerMonitor each, and the errors that their monitors ended them with."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        for rank in range(2):
            store.add(f"beat/{rank}", 0)
        self.end_errors: list[queue.Queue[BaseException]] = [queue.Queue(), queue.Queue()]
        self.ranks = [PeerMonitor(store, rank, HOSTS, 300.0, self.end_errors[rank].put) for rank in range(2)]

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()
            for thread in rank.threads:
                thread.join(TIMEOUT_SECONDS)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """A Pair with short heartbeat intervals. Its monitors are stopped after the test."""
    for name, seconds in {"_BEAT_SECONDS": 0.05, "_REPORTED_SECONDS": 0.5}.items():
        monkeypatch.setattr(heartbeat, name, seconds)
    two_ranks = Pair(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    yield two_ranks
    two_ranks.end()


def test_rank_blocked_in_a_kernel_ends_with_the_error_of_its_peer(pair: Pair) -> None:
    """A rank that waits in NCCL notices no failure by itself. Its monitor ends it with the error of the failed rank."""
    pair.ranks[1].report(ValueError("boom"))
    error = pair.end_errors[0].get(timeout=TIMEOUT_SECONDS)
    assert str(error) == "rank 1 of 2 on b: ValueError: boom"
    assert pair.end_errors[1].empty(), "who has failed ends by itself"


def test_monitor_does_not_end_a_rank_that_handles_the_failure_itself(pair: Pair) -> None:
    """With gloo, the connections break. The main thread gets an error, asks which rank failed first, and ends."""
    pair.ranks[1].report(ValueError("boom"))
    error = pair.ranks[0].find_first_failure()
    assert str(error) == "rank 1 of 2 on b: ValueError: boom"
    pair.ranks[0].end()
    for thread in pair.ranks[0].threads:
        thread.join(TIMEOUT_SECONDS)
    assert pair.end_errors[0].empty()


def test_rank_that_fails_alone_blames_no_peer_whose_heartbeats_are_slow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Heartbeats in a file are ten seconds apart. A rank looked at them for three, and took its peers for dead."""
    for name, seconds in {"_SLOW_BEAT_SECONDS": 0.3, "_REPORT_WAIT_SECONDS": 0.05}.items():
        monkeypatch.setattr(heartbeat, name, seconds)
    two_ranks = Pair(dist.FileStore(str(tmp_path / "store"), 2))
    try:
        assert two_ranks.ranks[1].find_first_failure() is None
    finally:
        two_ranks.end()
