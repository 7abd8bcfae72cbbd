"""WaitTable: which collective each rank waits in, over the store, because MPI does not report which rank is missing.

A rank writes its entry only after a long wait, so that normal collectives cost nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from everyrank.backends.operation_queue import Steps

__all__ = ["WaitTable"]

_READ_INTERVAL_SECONDS = 0.5


class WaitTable:
    """The number and the name of the collective in which each rank of a group waits.

    ranks       the global rank of each rank of the group, for messages
    connection  a second connection to the store, because another thread may be waiting on the first one
    number      number of collectives that this rank has started
    call        the current collective of this rank, as text
    last_read   time of the last read of the table; 0 in a new collective
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int]) -> None:
        self.store: Any = store
        self.rank, self.ranks = rank, ranks
        self.connection: Any = None
        self.number, self.call, self.last_read = 0, "", 0.0

    def begin(self, call: str) -> None:
        """Start the next collective of this group."""
        self.number, self.call, self.last_read = self.number + 1, call, 0.0

    def update_missing(self, missing: Sequence[int]) -> dict[int, str]:
        """Reduce the list `missing` to the ranks that have not reached this collective.

        Returns {}, the ranks known to have ended: MPI reports none.
        """
        if time.monotonic() < self.last_read + _READ_INTERVAL_SECONDS:
            return {}
        try:
            entries = self._exchange()
        except RuntimeError:  # the rank that hosts the store has ended
            return {}
        late_ranks = [rank for rank, (number, _) in entries.items() if number < self.number]
        if late_ranks and isinstance(missing, list):
            missing[:] = late_ranks
        return {}

    def describe_mismatch(self) -> Steps:
        """Wait for the entries of all ranks; the steps return a text that names a rank in a different collective."""
        missing: list[int] = []
        while True:
            entries = self._exchange()
            missing[:] = [rank for rank, (number, _) in entries.items() if number < self.number]
            if not missing:
                break
            yield missing
        rank, call = next((rank, call) for rank, (_, call) in entries.items() if call != self.call)
        return f"rank {self.ranks[self.rank]} calls {self.call}, but rank {self.ranks[rank]} calls {call}"

    def _exchange(self) -> dict[int, tuple[int, str]]:
        """Write this rank's entry and return those of the other ranks; (0, "") for a rank without one."""
        self.last_read = time.monotonic()
        self.connection = store = self.connection or self.store.clone()
        store.set(f"waits/{self.rank}", json.dumps([self.number, self.call]))
        keys = {rank: f"waits/{rank}" for rank in range(len(self.ranks)) if rank != self.rank}
        return {
            rank: tuple(json.loads(store.get(key))) if store.check([key]) else (0, "") for rank, key in keys.items()
        }
