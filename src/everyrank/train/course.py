"""The updates that a training has before it: from its start, or from where a checkpoint left it."""

from __future__ import annotations

from pathlib import Path

from everyrank.data import KnownUpdates, OpenUpdates, all_updates, epoch_of, is_uncounted
from everyrank.errors import UsageError
from everyrank.loop import planned_updates
from everyrank.train.job import TrainingJob

__all__ = ["check_left", "course_of"]


def check_left(job: TrainingJob, resumed: Path, begin: int, place: dict[str, int]) -> None:
    """Raise `UsageError` where more is done already than is asked for."""
    workload = job.prepared.workload
    if not is_uncounted(job.train_data):
        end = planned_updates(workload, job.train_data)
        if begin > end:
            raise UsageError(f"{resumed}: {begin} updates are done already, of {end} asked for; give more")
    elif not place:
        raise UsageError(f"{resumed}: it does not say how far the streams of the epoch had been read; start anew")
    elif workload.steps is not None and begin > workload.steps:
        raise UsageError(f"{resumed}: {begin} updates are done already, of {workload.steps} asked for; give more")
    elif workload.steps is None and (place["epoch"], place["index"]) > (workload.epochs or 1, 0):
        done, asked = f"{place['epoch']} epochs and {place['index']} updates", workload.epochs or 1
        raise UsageError(f"{resumed}: {done} are done already, of {asked} epochs asked for; give more")


def course_of(job: TrainingJob, begin: int, place: dict[str, int]) -> KnownUpdates | OpenUpdates:
    """The updates of the training; how many there are may show as it goes."""
    workload, data = job.prepared.workload, job.train_data
    if not is_uncounted(data):
        return all_updates(planned_updates(workload, data), epoch_of(workload, data).updates, begin)
    epochs = (workload.epochs or 1) if workload.steps is None else None
    return OpenUpdates(epochs, workload.steps, workload.drop_last, begin, **place)
