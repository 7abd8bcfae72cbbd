"""Memory that the ranks of one group share, without a name in any file system: nothing is left, however they end.

The first rank makes a file in memory (memfd) and says over the store where it is; the others open it through /proc, and
all map it. That works for processes of one user in one PID namespace; who cannot open it, or finds another file there,
shares no memory with the first rank, whatever the launcher says.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import platform
import resource
import secrets
import select
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from everyrank.backends.handshake import handshake
from everyrank.errors import CannotRunError

__all__ = ["Peers", "map_shared", "no_shared_memory"]

_STRONG_ORDER = ("x86_64", "amd64")
_TOKEN_BYTES = 16
_PROBE_BYTES = 4096
_MOST_BYTES = 2**30  # of the groups of many ranks


def no_shared_memory(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> str:
    """Why these ranks, all of one machine, cannot have this backend; empty where they can. A collective.

    It is tried, because no launcher knows: containers of one host have PID namespaces of their own.
    """
    why_not = _unfit_machine()
    if why_not:
        return why_not
    try:
        memory, peers = map_shared(store, rank, size, range(size), _PROBE_BYTES, timeout_seconds)
    except CannotRunError as error:
        return str(error)
    memory.close()
    peers.close()
    return ""


def _unfit_machine() -> str:
    """Ranks publish what they wrote by writing a number after it. A processor of weak memory order may show the number
    first, and Python has no instruction against that.
    """
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return f"shared memory needs Linux with memfd and pidfd; this is {platform.system()} {platform.release()}"
    if platform.machine().lower() not in _STRONG_ORDER:
        return f"shared memory needs a processor of strong memory order (x86-64); this is {platform.machine()}"
    return ""


class Peers:
    """The processes of the ranks of a group, each held by a descriptor: whether they live can be asked at any time.

    pids   of each rank; ranks  its number among all ranks
    """

    def __init__(self, pids: Sequence[int], ranks: Sequence[int]) -> None:
        self.pids, self.ranks = pids, ranks
        self.descriptors: dict[int, int] = {}
        for rank, pid in enumerate(pids):
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):  # it has ended already
                    self.descriptors[rank] = os.pidfd_open(pid)

    def lost(self, ranks: Sequence[int]) -> dict[int, str]:
        """Those of `ranks` that have ended, in words."""
        return {
            rank: f"rank {self.ranks[rank]} (process {self.pids[rank]}) has ended"
            for rank in ranks
            if self._ended(rank)
        }

    def _ended(self, rank: int) -> bool:
        if self.pids[rank] == os.getpid():
            return False
        descriptor = self.descriptors.get(rank)
        if descriptor is None:
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Let go of the descriptors."""
        while self.descriptors:
            os.close(self.descriptors.popitem()[1])


def map_shared(
    store: dist.Store, rank: int, size: int, ranks: Sequence[int], num_bytes: int, timeout_seconds: float
) -> tuple[mmap.mmap, Peers]:
    """`num_bytes` that all ranks of the group see, zero at first, and the ranks' processes. A collective.

    Raises `CannotRunError` on all of them where one shares no memory with the first, and `RankFailedError` that names
    who did not come in time.
    """
    # groups of one name may follow each other: each has keys of its own
    store = dist.PrefixStore(str(store.add(f"made/{rank}", 1)), store)
    failure, descriptor, memory = _forbidden(), -1, None
    try:
        if rank == 0:
            if not failure:
                descriptor = os.memfd_create("everyrank", os.MFD_CLOEXEC)
                os.ftruncate(descriptor, num_bytes + _TOKEN_BYTES)
                token = secrets.token_bytes(_TOKEN_BYTES)
                os.pwrite(descriptor, token, num_bytes)
                store.set("where", json.dumps([os.getpid(), descriptor, token.hex()]))
            else:
                store.set("where", "null")
        location = handshake(store, "where", ranks[0], "shared memory", timeout_seconds)
        if not failure and location is not None:
            try:
                descriptor = descriptor if rank == 0 else _open(location, num_bytes)
                memory = mmap.mmap(descriptor, num_bytes)
            except OSError as error:
                failure = f"{type(error).__name__}: {error.strerror}"
        store.set(f"mapped/{rank}", json.dumps([os.getpid(), failure]))
        answers = [
            handshake(store, f"mapped/{index}", ranks[index], "shared memory", timeout_seconds) for index in range(size)
        ]
    finally:
        if descriptor >= 0:  # all have opened it, or nobody waits for it any more
            os.close(descriptor)
    strangers = [f"rank {ranks[index]} ({why})" for index, (_, why) in enumerate(answers) if why]
    if strangers or memory is None:
        raise CannotRunError(f"no memory is shared with rank {ranks[0]} by {', '.join(strangers)}")
    return memory, Peers([pid for pid, _ in answers], ranks)


def _forbidden() -> str:
    """Why this process cannot have it; empty where it can. Old kernels and containers refuse the system calls."""
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if largest != resource.RLIM_INFINITY and largest < _MOST_BYTES:  # memory that is shared counts as a file
        return f"ulimit -f allows {largest:,} bytes, and many ranks share up to {_MOST_BYTES:,}"
    try:
        os.close(os.memfd_create("everyrank"))
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        return f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
    return ""


def _open(location: Any, num_bytes: int) -> int:
    pid, number, token = location
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(descriptor, _TOKEN_BYTES, num_bytes) != bytes.fromhex(token):
            raise FileNotFoundError(0, f"process {pid} of this host is another one")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
