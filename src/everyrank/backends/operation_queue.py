"""OperationQueue: the operations of a group that run one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from everyrank.errors import RankFailedError

__all__ = ["OperationQueue", "Steps", "Wait", "no_steps"]

Steps = Generator[list[int], None, Any]
"""An operation as a generator. At each wait it yields the group ranks that it waits for, the same list object until
this wait has ended.
"""
Wait = Iterable[list[int]]
"""A part of such steps, for `yield from`. It is empty if there is nothing to wait for."""


def no_steps() -> Steps:
    """Return the steps of an operation that is already done."""
    yield from ()


@dataclass(eq=False)
class OperationQueue:
    """The pending operations of a group, or of a pair of ranks, that run one after the other.

    ranks             the global rank of each rank of the group, for messages
    timeout_seconds   longest wait for another rank
    find_lost         returns a reason for each of the given ranks that has ended; None if the backend cannot tell
    from_any_source   whether one of the awaited ranks is enough, as for a receive without a source
    is_message        whether the timeout counts only during `wait()`, because a receive may be posted long before
    on_failure        called when an operation has failed, so that the other ranks stop waiting for this one
    operations        the pending operations, the running one first
    error             the error of a failed operation; all later operations fail, too
    """

    ranks: Sequence[int]
    timeout_seconds: float
    find_lost: Callable[[Sequence[int]], dict[int, str]] | None = None
    from_any_source: bool = False
    is_message: bool = False
    on_failure: Callable[[], None] | None = None
    operations: deque[Any] = field(default_factory=lambda: deque[Any]())
    error: BaseException | None = None

    def try_finish(self, steps: Steps) -> bool:
        """Run the steps up to their first wait, and return whether they are done.

        If not, the caller puts them into this queue. Needs the engine's lock. Raises the error of the steps.
        """
        if self.operations or self.error is not None:
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
        self.error = error
        if self.on_failure is not None:
            self.on_failure()
        while self.operations:
            self.operations.popleft().end(error)

    def timeout_error(self, name: str, missing: Sequence[int], seconds: float) -> RankFailedError:
        """Return the timeout error of operation `name`, with the missing ranks."""
        names = ", ".join(str(self.ranks[rank]) for rank in missing)
        return RankFailedError(
            f"{name} timed out after {seconds:g} s (--timeout): rank{'s' * (len(missing) > 1)} {names} did not come"
        )
