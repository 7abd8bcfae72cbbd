"""WaitTable: which collective each rank waits in, over the store, because MPI does not tell which rank is missing.

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

_LOOK_SECONDS = 0.5  # between two reads of the table


class WaitTable:
    """The number and the name of the collective in which each rank of a group waits.

    ranks   the number of each rank of the group among all ranks, for messages
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int]) -> None:
        self.store: Any = store
        self.rank, self.ranks = rank, ranks
        self.connection: Any = None  # a second connection, because another thread may wait on the group's
        self.number, self.call, self.looked = 0, "", 0.0

    def begin(self, call: str) -> None:
        """Start the next collective of this group."""
        self.number, self.call, self.looked = self.number + 1, call, 0.0

    def lost(self, missing: Sequence[int]) -> dict[int, str]:
        """Reduce `missing` to the ranks that have not reached this collective. Returns {}: MPI reports no dead rank."""
        if time.monotonic() < self.looked + _LOOK_SECONDS:
            return {}
        try:
            others = self._exchange()
        except RuntimeError:  # the rank that hosts the store has ended
            return {}
        absent = [rank for rank, (number, _) in others.items() if number < self.number]
        if absent and isinstance(missing, list):
            missing[:] = absent
        return {}

    def difference(self) -> Steps:
        """Return a text that names a rank in a different collective, once all ranks have written their entries."""
        missing: list[int] = []
        while True:
            others = self._exchange()
            missing[:] = [rank for rank, (number, _) in others.items() if number < self.number]
            if not missing:
                break
            yield missing
        rank, call = next((rank, call) for rank, (_, call) in others.items() if call != self.call)
        return f"rank {self.ranks[self.rank]} calls {self.call}, rank {self.ranks[rank]} {call}"

    def _exchange(self) -> dict[int, tuple[int, str]]:
        """Write this rank's entry and read those of the others; (0, "") for a rank without one."""
        self.looked = time.monotonic()
        self.connection = store = self.connection or self.store.clone()
        store.set(f"waits/{self.rank}", json.dumps([self.number, self.call]))
        names = {rank: f"waits/{rank}" for rank in range(len(self.ranks)) if rank != self.rank}
        return {
            rank: tuple(json.loads(store.get(name))) if store.check([name]) else (0, "") for rank, name in names.items()
        }
