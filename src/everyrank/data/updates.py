"""The updates of a training: one protocol for a number known in advance or found while the data is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from everyrank.data.order import KnownUpdates, Update
from everyrank.data.uneven import epoch_of, is_uncounted
from everyrank.data.uneven_updates import OpenUpdates
from everyrank.workload import Workload

__all__ = ["Updates", "make_updates", "planned_updates", "resume_problem"]


class Updates(Protocol):
    """Updates from `start_step` to the end of the training. `steps_done` always counts from the training's start."""

    @property
    def start_step(self) -> int:
        """The number of the first update."""
        ...

    @property
    def epoch(self) -> int:
        """The epoch of the next update."""
        ...

    @property
    def end(self) -> int | None:
        """The number of updates of the whole training, or None if it is not known yet."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether no update remains."""
        ...

    def ends_epoch(self, steps_done: int) -> bool:
        """Whether an epoch ends after `steps_done` updates."""
        ...

    def is_last(self, steps_done: int) -> bool:
        """Whether the training ends after `steps_done` updates."""
        ...

    def position(self, steps_done: int) -> dict[str, int]:
        """Return the entries that a checkpoint needs besides `steps_done` to resume the data; often none."""
        ...

    def samples_before(self, step: int) -> int:
        """Return the number of samples read before update `step`. Only differences of two such numbers are defined."""
        ...

    def __iter__(self) -> Iterator[Update]: ...


def make_updates(
    workload: Workload, dataset: Any, start_step: int = 0, position: Mapping[str, int] | None = None
) -> Updates:
    """Return the updates of a training from `start_step` on; `position` comes from `Updates.position`."""
    if is_uncounted(dataset):
        epochs = (workload.epochs or 1) if workload.steps is None else None
        return OpenUpdates(epochs, workload.steps, workload.drop_last, start_step, **(position or {}))
    return KnownUpdates(range(start_step, planned_updates(workload, dataset)), epoch_of(workload, dataset))


def planned_updates(workload: Workload, dataset: Any) -> int:
    """Return the number of updates in the workload's `epochs` or `steps`, on data of known length."""
    if workload.steps is not None:
        return workload.steps
    return (workload.epochs or 1) * epoch_of(workload, dataset).updates


def resume_problem(workload: Workload, dataset: Any, steps_done: int, position: Mapping[str, int]) -> str | None:
    """Return the reason why a checkpoint cannot be resumed with this workload and data, or None."""
    if not is_uncounted(dataset):
        end = planned_updates(workload, dataset)
        return _too_many_done(steps_done, end) if steps_done > end else None
    if not position:
        return "the checkpoint has no position in the streams of the epoch; start a new run"
    if workload.steps is not None:
        return _too_many_done(steps_done, workload.steps) if steps_done > workload.steps else None
    epochs = workload.epochs or 1
    if (position["epoch"], position["index"]) > (epochs, 0):
        return (
            f"{position['epoch']} epochs and {position['index']} updates are done already, and {epochs} epochs were "
            "requested; give a larger number"
        )
    return None


def _too_many_done(steps_done: int, end: int) -> str:
    return f"{steps_done} updates are done already, and {end} were requested; give a larger number"
