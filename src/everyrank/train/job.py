"""What is trained, on what data, and how good it is."""

from __future__ import annotations

from typing import Any, NamedTuple

from everyrank.checkpoint.generators import generators, set_generators
from everyrank.loop import evaluate, mean_metrics
from everyrank.strategies import Prepared

__all__ = ["TrainingJob", "evaluate_job"]


class TrainingJob(NamedTuple):
    """What is trained, and on what."""

    prepared: Prepared
    train_data: Any
    eval_data: Any


def evaluate_job(job: TrainingJob) -> dict[str, float]:
    """The metrics of the evaluation data, over all ranks; {} without such data. A collective.

    What a person's code draws meanwhile is given back: a training is the same however often it is evaluated.
    """
    if job.eval_data is None:
        return {}
    drawn = generators()
    found = mean_metrics(job.prepared.workload, evaluate(job.prepared, job.eval_data))
    set_generators(drawn)
    return found
