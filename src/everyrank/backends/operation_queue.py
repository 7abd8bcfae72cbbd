"""OperationQueue: the operations of a group that run one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from everyrank.errors import RankFailedError

__all__ = ["OperationQueue", "Steps", "Wait", "no_steps"]

Steps = Generator[list[int], None, Any]
"""A generator that yields, at each wait, the list of ranks of the group that it waits for: one list object a wait."""
Wait = Iterable[list[int]]
"""A part of such steps, for `yield from`: empty where there is nothing to wait for."""


def no_steps() -> Steps:
    """Return the steps of an operation that is already done."""
    yield from ()


@dataclass(eq=False)
class OperationQueue:
    """The pending operations of a group, or of a pair of ranks, that run one after the other.

    ranks             the number of each rank of the group among all ranks, for messages
    timeout_seconds   longest wait for another rank
    lost              returns those of some ranks that have ended, with a text each; None where this cannot be known
    is_any_enough     whether one of the ranks waited for is enough: a receive from any source
    is_message        whether the timeout counts only during `wait()`, because a receive may be posted long before
    broke             called when an operation has failed, so that the other ranks stop waiting for this one
    broken            the error of a failed operation; all later ones fail, too
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
        """Run the steps up to their first wait; return whether they are done.

        If not, the caller puts them into this queue. Needs the engine's lock. Raises the error of the steps.
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
        """Fail all operations of this queue. Needs the engine's lock."""
        self.broken = error
        if self.broke is not None:
            self.broke()
        while self.waiting:
            self.waiting.popleft().end(error)

    def late(self, name: str, missing: Sequence[int], seconds: float) -> RankFailedError:
        """Return the timeout error of operation `name`, with the missing ranks."""
        names = ", ".join(str(self.ranks[rank]) for rank in missing)
        return RankFailedError(
            f"{name} timed out after {seconds:g} s (--timeout): rank{'s' * (len(missing) > 1)} {names} did not come"
        )
