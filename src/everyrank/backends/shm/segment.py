"""Maps memory that the ranks of one group share. It has no name in a file system, so no file is left after a crash.

The first rank creates a file in memory (memfd) and writes its location to the store. The other ranks open it through
/proc, and all ranks map it. That works for processes of one user in one PID namespace. A rank that cannot open the
file, or finds a different one there, cannot share memory with the first rank.
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

_STRONGLY_ORDERED = ("x86_64", "amd64")
_TOKEN_BYTES = 16
_PROBE_BYTES = 4096
_MAX_GROUP_BYTES = 2**30


def no_shared_memory(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> str:
    """Return why these ranks, all of one host, cannot use this backend; "" if they can. A collective.

    The ranks try to share memory, because no launcher knows whether they can: each container of a host has its own PID
    namespace.
    """
    reason = _unsupported_machine()
    if reason:
        return reason
    try:
        memory, peers = map_shared(store, rank, size, range(size), _PROBE_BYTES, timeout_seconds)
    except CannotRunError as error:
        return str(error)
    memory.close()
    peers.close()
    return ""


def _unsupported_machine() -> str:
    """Return why this machine cannot use this backend; "" if it can.

    A rank writes data and then a counter, which tells the other ranks that the data is complete. On a processor with
    weak memory order the others may see the counter first, and Python has no memory barrier to prevent that.
    """
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return f"shared memory needs Linux with memfd and pidfd; this is {platform.system()} {platform.release()}"
    if platform.machine().lower() not in _STRONGLY_ORDERED:
        return f"shared memory needs a processor with strong memory order (x86-64); this is {platform.machine()}"
    return ""


class Peers:
    """The processes of a group's ranks, each held by a descriptor (pidfd) that tells whether it has ended.

    pids         of each rank of the group
    ranks        the global rank of each rank of the group, for messages
    descriptors  group rank -> descriptor, without this process and without ranks that had already ended
    """

    def __init__(self, pids: Sequence[int], ranks: Sequence[int]) -> None:
        self.pids, self.ranks = pids, ranks
        self.descriptors: dict[int, int] = {}
        for rank, pid in enumerate(pids):
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):  # it has ended already
                    self.descriptors[rank] = os.pidfd_open(pid)

    def find_ended(self, group_ranks: Sequence[int]) -> dict[int, str]:
        """Return a message for each of the given ranks that has ended."""
        return {
            rank: f"rank {self.ranks[rank]} (process {self.pids[rank]}) has ended"
            for rank in group_ranks
            if self._has_ended(rank)
        }

    def _has_ended(self, rank: int) -> bool:
        if self.pids[rank] == os.getpid():
            return False
        descriptor = self.descriptors.get(rank)
        if descriptor is None:
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the descriptors."""
        while self.descriptors:
            os.close(self.descriptors.popitem()[1])


def map_shared(
    store: dist.Store, rank: int, size: int, ranks: Sequence[int], num_bytes: int, timeout_seconds: float
) -> tuple[mmap.mmap, Peers]:
    """Return `num_bytes` of shared memory, filled with zeros, and the processes of the ranks. A collective.

    Raises `CannotRunError` on all ranks if one cannot share memory with the first, and `RankFailedError` naming a rank
    that does not arrive in time.
    """
    # a later group may have the same name, so each group has its own prefix
    store = dist.PrefixStore(str(store.add(f"made/{rank}", 1)), store)
    failure, descriptor, memory = _missing_system_call(), -1, None
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
        entries = [
            handshake(store, f"mapped/{index}", ranks[index], "shared memory", timeout_seconds) for index in range(size)
        ]
    finally:
        if descriptor >= 0:  # all ranks have opened it, or the group has failed
            os.close(descriptor)
    failures = [f"rank {ranks[index]}: {reason}" for index, (_, reason) in enumerate(entries) if reason]
    if failures or memory is None:
        raise CannotRunError(f"the ranks cannot share memory: {'; '.join(failures)}")
    return memory, Peers([pid for pid, _ in entries], ranks)


def _missing_system_call() -> str:
    """Return why this process cannot share memory; "" if it can. Old kernels and containers refuse the system calls."""
    max_file_bytes = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    # shared memory counts as a file
    if max_file_bytes != resource.RLIM_INFINITY and max_file_bytes < _MAX_GROUP_BYTES:
        return f"ulimit -f allows {max_file_bytes:,} bytes, and a group needs up to {_MAX_GROUP_BYTES:,}"
    try:
        os.close(os.memfd_create("everyrank"))
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        return f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
    return ""


def _open(location: Any, num_bytes: int) -> int:
    """Open the file of the first rank, and return its descriptor. Raises `OSError` if it is a different file."""
    pid, remote_descriptor, token = location
    descriptor = os.open(f"/proc/{pid}/fd/{remote_descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(descriptor, _TOKEN_BYTES, num_bytes) != bytes.fromhex(token):
            raise FileNotFoundError(0, f"process {pid} of this host is not rank 0 of the group")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
