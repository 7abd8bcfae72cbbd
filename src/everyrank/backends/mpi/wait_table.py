"""Who is missing in a collective, and what the others call: said in the store, because MPI does not tell.

A rank writes only when it waits long, so that nothing is written while all goes well.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from everyrank.backends.operation_queue import Steps

__all__ = ["WaitTable"]

_LOOK_SECONDS = 0.5  # from one look at the others to the next


class WaitTable:
    """What each rank of a group waits in: the number of the collective, and what it calls.

    ranks   the number of each rank of the group among all ranks, for messages
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int]) -> None:
        self.store: Any = store
        self.rank, self.ranks = rank, ranks
        self.own: Any = None  # a connection for this alone: another thread may wait in the group's
        self.number, self.call, self.looked = 0, "", 0.0

    def begin(self, call: str) -> None:
        """The next collective of this group."""
        self.number, self.call, self.looked = self.number + 1, call, 0.0

    def lost(self, missing: Sequence[int]) -> dict[int, str]:
        """Leave in `missing` those who have not come, as far as one knows. Nobody is known to have ended: {}."""
        if time.monotonic() < self.looked + _LOOK_SECONDS:
            return {}
        try:
            others = self._look()
        except RuntimeError:  # the store is gone with the rank that kept it
            return {}
        absent = [rank for rank, (number, _) in others.items() if number < self.number]
        if absent and isinstance(missing, list):
            missing[:] = absent
        return {}

    def difference(self) -> Steps:
        """Who calls something else, in words, as soon as all have said what they call."""
        missing: list[int] = []
        while True:
            others = self._look()
            missing[:] = [rank for rank, (number, _) in others.items() if number < self.number]
            if not missing:
                break
            yield missing
        rank, call = next((rank, call) for rank, (_, call) in others.items() if call != self.call)
        return f"rank {self.ranks[self.rank]} calls {self.call}, rank {self.ranks[rank]} {call}"

    def _look(self) -> dict[int, tuple[int, str]]:
        """Say where this rank is, and see where the others are; 0 where one has said nothing yet."""
        self.looked = time.monotonic()
        self.own = store = self.own or self.store.clone()
        store.set(f"waits/{self.rank}", json.dumps([self.number, self.call]))
        names = {rank: f"waits/{rank}" for rank in range(len(self.ranks)) if rank != self.rank}
        return {
            rank: tuple(json.loads(store.get(name))) if store.check([name]) else (0, "") for rank, name in names.items()
        }
