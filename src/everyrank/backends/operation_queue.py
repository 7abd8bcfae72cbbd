"""Operations that come one after the other, and whom they wait for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from everyrank.errors import RankFailedError

__all__ = ["OperationQueue", "Steps", "Wait", "no_steps"]

Steps = Generator[list[int], None, Any]
"""Yields the ranks of the group that are waited for whenever it cannot go on: one list object for each wait."""
Wait = Iterable[list[int]]
"""A part of such steps, for `yield from`: empty where nobody has to be waited for."""


def no_steps() -> Steps:
    """Of what is done."""
    yield from ()


@dataclass(eq=False)
class OperationQueue:
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

    def ends_at_once(self, steps: Steps) -> bool:
        """Whether these steps come to their end here and now, as they do where all ranks do the same. Else they have
        begun, and are to go on in this queue. Under the engine's lock. Raises what they failed with.
        """
        if self.waiting or self.broken is not None:
            return False
        try:
            next(steps)
        except StopIteration:
            return True
        except BaseException as error:
            self.fail(error)
            raise
        return False

    def fail(self, error: BaseException) -> None:
        """No operation of this queue can be right any more. Under the engine's lock."""
        self.broken = error
        if self.broke is not None:
            self.broke()
        while self.waiting:
            self.waiting.popleft().end(error)

    def late(self, name: str, missing: Sequence[int], seconds: float) -> RankFailedError:
        """What is raised in an operation of this name when these ranks have not come in time."""
        names = ", ".join(str(self.ranks[rank]) for rank in missing)
        return RankFailedError(
            f"{name} timed out after {seconds:g} s (--timeout): rank{'s' * (len(missing) > 1)} {names} did not come"
        )
