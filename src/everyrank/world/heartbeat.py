"""The other ranks: who they are, whether they still live, and which of them failed first.

On one host the supervisors know all that. Between hosts nobody does: a link that goes down is silent, and what a
surviving rank sees of another's death is a connection that closed. So each rank leaves signs of life in the store.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import platform
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from everyrank._version import __version__
from everyrank.errors import CannotRunError, EveryrankError, RankFailedError, UsageError, describe
from everyrank.launch.hosts import boot_id, host_name, local_address_towards

__all__ = [
    "Peer",
    "PeerMonitor",
    "check_same_device",
    "count_devices",
    "hosts_text",
    "is_secondary_error",
    "register_rank",
    "route_to_peers",
    "wait_for_peers",
]

_BEAT_SECONDS = 1.0
_SLOW_BEAT_SECONDS = 10.0  # where the store is a file, which grows with each
_ASK_SECONDS = 3.0  # after a failure, to find out whose it was
_REPORTED_SECONDS = 5.0  # more than that: for a rank to meet by itself what another one has reported
_SILENT_AFTER = 0.8  # of the timeout: before the backend's own, which names nobody
_FAILURES = "failures"  # how many ranks have reported one
# what a backend says when another rank went away
_ANSWERS = re.compile(
    r"closed by peer|reset by peer|broken pipe|timed? ?out|"
    r"\b(gloo|nccl|shm|mpi|horovod|sockets?|connections?|store|tcpstore)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Peer:
    """A rank, as it has introduced itself: its host, which machine that is, its address on the way to rank 0.

    device   what it computes on: `cpu`, or `cuda` and which card of its machine that is
    """

    host: str
    boot: str
    address: str | None
    device: str = "cpu"


def register_rank(store: dist.Store, rank: int, address: str | None, device: str = "cpu") -> None:
    """Say who this is. Raises `UsageError` where another process says that it is the same rank."""
    if store.add(f"present/{rank}", 1) > 1:
        raise UsageError(
            f"rank {rank} is there already: a run that was killed left this meeting place behind (remove the file, or "
            "give another name or port), or two processes have the same rank"
        )
    store.add(f"beat/{rank}", 0)
    own = {"host": host_name(), "boot": boot_id(), "address": address, "device": device}
    store.set(f"who/{rank}", json.dumps(own | _versions()))


def _versions() -> dict[str, str]:
    return {
        "torch": torch.__version__.partition("+")[0],  # one host may have the build for CPU
        "everyrank": __version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


def wait_for_peers(store: dist.Store, size: int) -> list[Peer]:
    """All ranks, when they have introduced themselves.

    Raises `CannotRunError` where their versions differ: what they send each other would mean different things.
    """
    rows = [json.loads(store.get(f"who/{rank}")) for rank in range(size)]
    for name in _versions():
        for rank, row in enumerate(rows):
            if row[name] != rows[0][name]:
                raise CannotRunError(
                    f"rank {rank} on {row['host']} has {name} {row[name]}, and rank 0 on {rows[0]['host']} has "
                    f"{rows[0][name]}: install the same on all hosts"
                )
    return [Peer(row["host"], row["boot"], row["address"], row["device"]) for row in rows]


def check_same_device(others: Sequence[Peer]) -> None:
    """Raise `CannotRunError`, on every rank alike, where some compute on CPU and others on CUDA: no backend does both.

    It is what a node whose driver is dead looks like among healthy ones: each for itself takes what it sees.
    """
    kinds = [other.device.partition(" ")[0] for other in others]
    for kind, rank in ((kind, rank) for rank, kind in enumerate(kinds) if kind != kinds[0]):
        on_cpu, on_cuda = (rank, 0) if kind == "cpu" else (0, rank)
        raise CannotRunError(
            f"rank {on_cpu} on {others[on_cpu].host} computes on CPU, where torch sees no CUDA device, and rank "
            f"{on_cuda} on {others[on_cuda].host} on CUDA: see `everyrank doctor` there, or give all --device cpu"
        )


def count_devices(others: Sequence[Peer]) -> tuple[int, int]:
    """(ranks, different devices that they compute on) of the machine whose ranks share devices most."""
    devices_of: dict[str, list[str]] = {}
    for other in others:
        devices_of.setdefault(other.boot, []).append(other.device)
    counts = [(len(devices), len(set(devices))) for devices in devices_of.values()]
    return max(counts, key=lambda pair: pair[0] / pair[1])


def route_to_peers(others: Sequence[Peer], rank: int, address: str | None) -> tuple[bool, str | None]:
    """(whether all are on this machine, else its own address on the way to the others)."""
    elsewhere = [other for other in others if other.boot != others[rank].boot]
    if not elsewhere or address is not None:
        return not elsewhere, address
    # rank 0, and who shares its machine: the way back to whoever has come from another
    known = [local_address_towards(other.address) for other in elsewhere if other.address is not None]
    return False, next((way for way in known if way is not None), None)


def is_secondary_error(error: BaseException) -> bool:
    """Whether an error may only be what this rank saw of another one's failure."""
    if isinstance(error, EveryrankError):
        return isinstance(error, RankFailedError) and bool(_ANSWERS.search(str(error)))
    return isinstance(error, RuntimeError) and bool(_ANSWERS.search(str(error)))


def hosts_text(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """`ranks 2, 3 on n2` or `rank 1 on n1, rank 3 on n2`."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    parts = [f"rank{'s' * (len(own) > 1)} {', '.join(map(str, own))} on {host}" for host, own in by_host.items()]
    return ", ".join(parts)


class PeerMonitor:
    """Signs of life of this rank, and an eye on those of the others. For ranks of several hosts.

    fail   ends this process with an error, when its main thread is in a collective that will not end
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        hosts: Sequence[str],
        timeout_seconds: float,
        fail: Callable[[BaseException], None] | None,
    ) -> None:
        # a store of its own: one that waits for an answer keeps others from asking
        own: Any = store
        self.store, self.rank, self.hosts = own.clone(), rank, hosts
        self.store.set_timeout(datetime.timedelta(seconds=min(5.0, timeout_seconds)))
        self.limit_seconds, self.fail = _SILENT_AFTER * timeout_seconds, fail
        self.beats = [b""] * len(hosts)
        now = time.monotonic()
        self.heard = [now] * len(hosts)  # when each was last heard of
        self.answered = now  # when the store last answered
        self.reported: tuple[float, RankFailedError] | None = None  # what another rank met, and when that was heard
        self.beat_seconds = _BEAT_SECONDS if self.store.has_extended_api() else _SLOW_BEAT_SECONDS
        self.over = threading.Event()
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._watch)]
        for thread in self.threads:
            thread.start()

    def end(self) -> None:
        """No more signs of life."""
        self.over.set()

    def _beat(self) -> None:
        while not self.over.wait(self.beat_seconds):
            with contextlib.suppress(Exception):  # a store that is gone is seen by the watch
                self._exchange()

    def _exchange(self) -> None:
        self.store.add(f"beat/{self.rank}", 1)
        names = [f"beat/{rank}" for rank in range(len(self.hosts))]
        asks_once = self.store.has_extended_api()
        beats = self.store.multi_get(names) if asks_once else [self.store.get(name) for name in names]
        now = time.monotonic()
        for rank, beat in enumerate(beats):
            if beat != self.beats[rank]:
                self.beats[rank], self.heard[rank] = beat, now
        self.answered = now
        if self.reported is None and self.store.check([_FAILURES]):  # one question, however many ranks there are
            error = self._first_report()
            self.reported = (now, error) if error is not None else None

    def _watch(self) -> None:
        """In a thread of its own: the one above may wait for a store that no longer answers."""
        while not self.over.wait(_BEAT_SECONDS / 2):
            error = self._lost(self.limit_seconds) or self._unanswered()
            if error is not None and self.fail is not None:
                self.fail(error)

    def _unanswered(self) -> RankFailedError | None:
        """What another rank has reported, where this one has met no end by itself.

        gloo's connections break with the rank that ends; in a kernel of nccl nothing happens, until its watchdog ends
        this process without a word of whose failure it was.
        """
        if self.reported is None or time.monotonic() < self.reported[0] + _REPORTED_SECONDS:
            return None
        return self.reported[1]

    def _lost(self, seconds: float) -> RankFailedError | None:
        """Whoever has not been heard of for so long."""
        now = time.monotonic()
        why = "killed, or the host or the link to it is down"
        if now > self.answered + seconds:
            there = [rank for rank, host in enumerate(self.hosts) if host == self.hosts[0]]
            return RankFailedError(f"{hosts_text(there, self.hosts)}: no answer for {now - self.answered:.0f} s: {why}")
        silences = {rank: now - heard for rank, heard in enumerate(self.heard) if rank != self.rank}
        longest = max(silences.values(), default=0.0)
        if longest < seconds:
            return None
        # one host's ranks fall silent within a beat or two of each other
        silent = [rank for rank, silence in silences.items() if silence > longest - 3 * self.beat_seconds]
        return RankFailedError(f"{hosts_text(silent, self.hosts)}: no sign for {longest:.0f} s: {why}")

    def report(self, error: BaseException) -> None:
        """Tell the others what this rank met, where it was the first to."""
        with contextlib.suppress(Exception):
            self.store.set(f"failed/{self.rank}", describe(error))
            self.store.add(_FAILURES, 1)

    def _first_report(self) -> RankFailedError | None:
        """What another rank has told of itself; None where none has."""
        for rank, host in enumerate(self.hosts):
            with contextlib.suppress(Exception):
                if rank != self.rank and self.store.check([f"failed/{rank}"]):
                    message: Any = self.store.get(f"failed/{rank}")
                    return RankFailedError(f"rank {rank} of {len(self.hosts)} on {host}: {message.decode()}")
        return None

    def find_first_failure(self) -> RankFailedError | None:
        """After an error that is but an answer: what another rank has reported, or who is no longer there.

        Waits a few seconds for it; None where nothing is known.
        """
        begun = time.monotonic()
        answered_before = self.answered
        while time.monotonic() < begun + _ASK_SECONDS:
            if (error := self._first_report()) is not None:
                return error
            time.sleep(0.1)
        if self.answered == answered_before:
            return RankFailedError(
                f"rank 0 of {len(self.hosts)} on {self.hosts[0]}: gone without a word (its store no longer answers): "
                "killed, or its host is down"
            )
        silent = [rank for rank, heard in enumerate(self.heard) if heard < begun - self.beat_seconds * 0.5]
        silent = [rank for rank in silent if rank != self.rank]
        if silent:
            return RankFailedError(
                f"{hosts_text(silent, self.hosts)}: gone without a word: killed, or the host is down"
            )
        return None
