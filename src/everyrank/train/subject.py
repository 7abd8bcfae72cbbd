"""What is trained, and how good it is."""

from __future__ import annotations

from typing import Any, NamedTuple

from everyrank.checkpoint.generators import generators, set_generators
from everyrank.layout import Layout
from everyrank.loop import evaluate, mean_metrics
from everyrank.strategies import Prepared
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["Subject", "evaluated"]


class Subject(NamedTuple):
    """What is trained, on what, and where."""

    workload: Workload
    train_data: Any
    eval_data: Any
    layout: Layout
    world: World
    prepared: Prepared


def evaluated(subject: Subject) -> dict[str, float]:
    """The metrics of the evaluation data, over all ranks; {} without such data. A collective.

    What a person's code draws meanwhile is given back: a training is the same however often it is evaluated.
    """
    if subject.eval_data is None:
        return {}
    workload, _, data, layout, world, prepared = subject
    drawn = generators()
    found = mean_metrics(workload, evaluate(workload, data, layout, world, prepared))
    set_generators(drawn)
    return found
