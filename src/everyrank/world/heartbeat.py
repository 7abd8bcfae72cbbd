"""Heartbeats over the store: registers the ranks, detects lost ranks, and finds the rank that failed first.

On one host the supervisors see how each rank ends. Between hosts a broken link shows no error, and a surviving rank
sees only a closed connection. So each rank writes a heartbeat to the store, and every rank reads them all.
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
from everyrank.launch.host_info import boot_id, host_name, local_address_towards

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
_SLOW_BEAT_SECONDS = 10.0  # for a store in a file, because each beat makes the file longer
_REPORT_WAIT_SECONDS = 3.0  # how long a rank at least waits for reports after an error, to find who failed first
_REPORTED_SECONDS = (
    5.0  # how long a rank may run after another rank's report before it fails; longer than _REPORT_WAIT_SECONDS
)
_SILENT_AFTER = 0.8  # fraction of the timeout: earlier than the backend's error, which does not name the rank
_FAILURES = "failures"  # key: how many ranks have reported a failure
# in the error of a backend when another rank has ended
_COMMUNICATION_ERROR = re.compile(
    r"closed by peer|reset by peer|broken pipe|timed? ?out|"
    r"\b(gloo|nccl|shm|mpi|horovod|sockets?|connections?|store|tcpstore)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Peer:
    """The registration of a rank: its host, the boot id of its machine, its address on the route to rank 0.

    device   `cpu`, or `cuda` and the card of its machine
    """

    host: str
    boot: str
    address: str | None
    device: str = "cpu"


def register_rank(store: dist.Store, rank: int, address: str | None, device: str = "cpu") -> None:
    """Write this rank's host, address, device and versions to the store.

    Raises `UsageError` if another process has registered as the same rank.
    """
    if store.add(f"present/{rank}", 1) > 1:
        raise UsageError(
            f"rank {rank} has already registered. A killed run left this rendezvous behind (remove the file, or "
            "use another name or port), or two processes have the same rank"
        )
    store.add(f"beat/{rank}", 0)
    entry = {"host": host_name(), "boot": boot_id(), "address": address, "device": device}
    store.set(f"who/{rank}", json.dumps(entry | _versions()))


def _versions() -> dict[str, str]:
    return {
        "torch": torch.__version__.partition("+")[0],  # without the suffix: one host may have the CPU build
        "everyrank": __version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


def wait_for_peers(store: dist.Store, size: int) -> list[Peer]:
    """Wait until all ranks have registered, and return them by rank.

    Raises `CannotRunError` if their versions of torch, everyrank or Python differ.
    """
    rows = [json.loads(store.get(f"who/{rank}")) for rank in range(size)]
    for name in _versions():
        for rank, row in enumerate(rows):
            if row[name] != rows[0][name]:
                raise CannotRunError(
                    f"rank {rank} on {row['host']} has {name} {row[name]}, and rank 0 on {rows[0]['host']} has "
                    f"{rows[0][name]}: install the same version on all hosts"
                )
    return [Peer(row["host"], row["boot"], row["address"], row["device"]) for row in rows]


def check_same_device(peers: Sequence[Peer]) -> None:
    """Raise `CannotRunError` on every rank if some compute on CPU and others on CUDA.

    This happens if the driver of one node does not work, because each rank uses the devices that it sees.
    """
    kinds = [other.device.partition(" ")[0] for other in peers]
    for kind, rank in ((kind, rank) for rank, kind in enumerate(kinds) if kind != kinds[0]):
        on_cpu, on_cuda = (rank, 0) if kind == "cpu" else (0, rank)
        raise CannotRunError(
            f"rank {on_cpu} on {peers[on_cpu].host} computes on CPU, because torch sees no CUDA device there, but "
            f"rank {on_cuda} on {peers[on_cuda].host} on CUDA. Run `everyrank doctor` there, or add --device cpu"
        )


def count_devices(peers: Sequence[Peer]) -> tuple[int, int]:
    """Return (ranks, distinct devices) of the machine with the most ranks for each device."""
    devices_of: dict[str, list[str]] = {}
    for peer in peers:
        devices_of.setdefault(peer.boot, []).append(peer.device)
    counts = [(len(devices), len(set(devices))) for devices in devices_of.values()]
    return max(counts, key=lambda pair: pair[0] / pair[1])


def route_to_peers(peers: Sequence[Peer], rank: int, address: str | None) -> tuple[bool, str | None]:
    """Return whether all ranks are on this machine, and this machine's address on the route to the others."""
    remote_peers = [other for other in peers if other.boot != peers[rank].boot]
    if not remote_peers or address is not None:
        return not remote_peers, address
    # rank 0 and the ranks on its machine have no address yet: take the route to a peer that has one
    known = [local_address_towards(other.address) for other in remote_peers if other.address is not None]
    return False, next((address for address in known if address is not None), None)


def is_secondary_error(error: BaseException) -> bool:
    """Return whether an error may be only the effect of another rank's failure."""
    if isinstance(error, EveryrankError):
        return isinstance(error, RankFailedError) and bool(_COMMUNICATION_ERROR.search(str(error)))
    return isinstance(error, RuntimeError) and bool(_COMMUNICATION_ERROR.search(str(error)))


def hosts_text(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return ranks with their hosts, for example `ranks 2, 3 on n2` or `rank 1 on n1, rank 3 on n2`."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    return ", ".join(
        f"rank{'s' * (len(local_ranks) > 1)} {', '.join(map(str, local_ranks))} on {host}"
        for host, local_ranks in by_host.items()
    )


class PeerMonitor:
    """Threads that write this rank's heartbeat and watch those of the others, for ranks on several hosts.

    fail   ends this process with an error, because its main thread may be in a collective that never ends
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        hosts: Sequence[str],
        timeout_seconds: float,
        fail: Callable[[BaseException], None] | None,
    ) -> None:
        # a second connection: a request that waits for an answer blocks all others on the same one
        cloneable: Any = store
        self.store, self.rank, self.hosts = cloneable.clone(), rank, hosts
        self.store.set_timeout(datetime.timedelta(seconds=min(5.0, timeout_seconds)))
        self.limit_seconds, self.fail = _SILENT_AFTER * timeout_seconds, fail
        self.beats = [b""] * len(hosts)
        now = time.monotonic()
        self.heard = [now] * len(hosts)  # when each rank's heartbeat last changed
        self.answered = now  # when the store last answered
        self.reported: tuple[float, RankFailedError] | None = (
            None  # when another rank's report was read, and the report
        )
        self.beat_seconds = _BEAT_SECONDS if self.store.has_extended_api() else _SLOW_BEAT_SECONDS
        self.over = threading.Event()
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._watch)]
        for thread in self.threads:
            thread.start()

    def end(self) -> None:
        """Stop the heartbeat and the watch."""
        self.over.set()

    def _beat(self) -> None:
        while not self.over.wait(self.beat_seconds):
            with contextlib.suppress(Exception):  # `_watch` notices a store that is gone
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
        if self.reported is None and self.store.check([_FAILURES]):  # one request for any number of ranks
            error = self._first_report()
            self.reported = (now, error) if error is not None else None

    def _watch(self) -> None:
        """Fail if ranks are lost. A separate thread, because `_beat` may wait for a store that no longer answers."""
        while not self.over.wait(_BEAT_SECONDS / 2):
            error = self._lost(self.limit_seconds) or self._overdue_report()
            if error is not None and self.fail is not None:
                self.fail(error)

    def _overdue_report(self) -> RankFailedError | None:
        """Return another rank's failure if this rank has not failed some seconds after it.

        gloo's connections break when a rank ends. A kernel of nccl goes on until its watchdog ends this process,
        and the watchdog does not name the rank that failed.
        """
        if self.reported is None or time.monotonic() < self.reported[0] + _REPORTED_SECONDS:
            return None
        return self.reported[1]

    def _lost(self, seconds: float) -> RankFailedError | None:
        """Return an error with the ranks whose heartbeat has not changed for `seconds`."""
        now = time.monotonic()
        reason = "killed, or the host or the link to it is down"
        if now > self.answered + seconds:
            ranks_of_host_0 = [rank for rank, host in enumerate(self.hosts) if host == self.hosts[0]]
            return RankFailedError(
                f"{hosts_text(ranks_of_host_0, self.hosts)}: no answer for {now - self.answered:.0f} s: {reason}"
            )
        silences = {rank: now - heard for rank, heard in enumerate(self.heard) if rank != self.rank}
        longest = max(silences.values(), default=0.0)
        if longest < seconds:
            return None
        # the ranks of one host stop within a beat or two of each other
        silent = [rank for rank, silence in silences.items() if silence > longest - 3 * self.beat_seconds]
        return RankFailedError(f"{hosts_text(silent, self.hosts)}: no sign for {longest:.0f} s: {reason}")

    def report(self, error: BaseException) -> None:
        """Write this rank's error to the store, for the other ranks."""
        with contextlib.suppress(Exception):
            self.store.set(f"failed/{self.rank}", describe(error))
            self.store.add(_FAILURES, 1)

    def _first_report(self) -> RankFailedError | None:
        """Return the error that another rank has reported, if any."""
        for rank, host in enumerate(self.hosts):
            with contextlib.suppress(Exception):
                if rank != self.rank and self.store.check([f"failed/{rank}"]):
                    message: Any = self.store.get(f"failed/{rank}")
                    return RankFailedError(f"rank {rank} of {len(self.hosts)} on {host}: {message.decode()}")
        return None

    def find_first_failure(self) -> RankFailedError | None:
        """Return the failure of another rank that caused a secondary error on this one.

        Waits for a report or three missing heartbeats; returns None if no other rank has failed.
        """
        start = time.monotonic()
        answered_before = self.answered
        while time.monotonic() < start + max(_REPORT_WAIT_SECONDS, 3 * self.beat_seconds):
            if (error := self._first_report()) is not None:
                return error
            time.sleep(0.1)
        if self.answered == answered_before:
            return RankFailedError(
                f"rank 0 of {len(self.hosts)} on {self.hosts[0]}: ended without an error message (its store no "
                "longer answers): killed, or its host is down"
            )
        silent = [rank for rank, heard in enumerate(self.heard) if heard < start - self.beat_seconds * 0.5]
        silent = [rank for rank in silent if rank != self.rank]
        if silent:
            return RankFailedError(
                f"{hosts_text(silent, self.hosts)}: ended without an error message: killed, or the host is down"
            )
        return None
