"""Operations that come one after the other, and whom they wait for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from everyrank.errors import RankFailedError

__all__ = ["Lane", "Steps"]

Steps = Generator[list[int], None, Any]
"""Yields the ranks of the group that are waited for whenever it cannot go on: one list object for each wait."""


@dataclass(eq=False)
class Lane:
    """Operations that come one after the other.

    ranks             the number of each rank of the group among all ranks, for messages
    timeout_seconds   longest wait for another rank
    lost              of some ranks of the group, those that have ended, in words; None where nobody can know
    is_any_enough     whether one of the ranks waited for is enough: a receive from any source
    is_message        whether its time runs only while somebody waits: a receive may be posted long before
    broke             called when an operation has failed, so that others need not wait for this rank
    broken            what an operation failed with: none after it can be right
    """

    ranks: Sequence[int]
    timeout_seconds: float
    lost: Callable[[Sequence[int]], dict[int, str]] | None = None
    is_any_enough: bool = False
    is_message: bool = False
    broke: Callable[[], None] | None = None
    waiting: deque[Any] = field(default_factory=lambda: deque[Any]())
    broken: BaseException | None = None

    def late(self, name: str, missing: Sequence[int], seconds: float) -> RankFailedError:
        """What is raised in an operation of this name when these ranks have not come in time."""
        names = ", ".join(str(self.ranks[rank]) for rank in missing)
        return RankFailedError(
            f"{name} timed out after {seconds:g} s (--timeout): rank{'s' * (len(missing) > 1)} {names} did not come"
        )
