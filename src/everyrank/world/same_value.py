"""SameValue: compares a value of this rank with those of other ranks over the store, whenever it changes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch.distributed as dist

from everyrank.errors import RankFailedError
from everyrank.world.barrier import missing_ranks
from everyrank.world.world import World

__all__ = ["SameValue"]

_NUMBERS = itertools.count()  # each object has keys of its own, the same on all ranks


class SameValue:
    """A value that has to be the same on some ranks. Every rank makes the object, and calls it equally often.

    All ranks compare their first values. Later, only a rank whose value has changed looks at the others. If two ranks
    differ, at least one of them has changed, so it finds the difference. Values that stay the same send nothing.

    ranks   those that are compared; None: all
    """

    def __init__(self, world: World, ranks: Sequence[int] | None = None) -> None:
        self.world, self.ranks = world, list(range(world.size)) if ranks is None else list(ranks)
        self.value: str | None = None
        is_pretended = world.group is not None and dist.get_backend(world.group) == "fake"
        self.is_compared = len(self.ranks) > 1 and not is_pretended
        # rank 0 alone may make objects that are not compared, for the training on one device
        self.key, self.num_calls = f"same/{next(_NUMBERS) if self.is_compared else None}", 0

    def differences(self, value: str) -> tuple[dict[int, str], bool]:
        """Return the values by rank if some differ, else {}, and whether every rank knows. May be a collective.

        Raises `RankFailedError` if a rank has no first value within the timeout.
        """
        self.num_calls += 1
        if value == self.value or not self.is_compared:
            return {}, True
        value_before, self.value = self.value, value
        where = f"{self.key}/{self.num_calls}"
        self.world.store.set(f"{where}/{self.world.rank}", value)
        values, missing = self._read(where, is_first=value_before is None)
        if missing and value_before is None:
            raise RankFailedError(
                f"rank {missing[0]} did not reach the end of its first update ({self.world.start_flag})"
            )
        # a rank that has not changed its value still has the one that all ranks had
        values |= dict.fromkeys(missing, value_before or "")
        return (values if len(set(values.values())) > 1 else {}), not missing

    def _read(self, where: str, is_first: bool) -> tuple[dict[int, str], list[int]]:
        """Return the values by rank, and the ranks without one. Waits for all, or later only for the first difference.

        Half the timeout, so that the error comes before those of other ranks, which wait in their next collective.
        """
        step_seconds = None if is_first else self.world.step_timeout_seconds
        deadline = time.monotonic() + (step_seconds or self.world.timeout_seconds) / 2
        values: dict[int, str] = {}
        missing, pause = self.ranks, 0.001
        while missing:
            still_missing = missing_ranks(self.world, where, missing)
            arrived = [rank for rank in missing if rank not in still_missing]
            values |= {rank: self.world.store.get(f"{where}/{rank}").decode() for rank in arrived}
            missing = still_missing
            if time.monotonic() > deadline or (not is_first and len(set(values.values())) > 1):
                break
            if missing:
                time.sleep(pause)
                pause = min(0.05, pause * 1.5)
        return values, missing
