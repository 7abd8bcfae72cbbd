"""What the numbers say: one kind of mistake a file, each a function of the evidence that adds findings.

data.py          which samples the ranks read
batches.py       whether batches are divided twice
gradients.py     what each backward weighs in the gradient that steps
loss_terms.py    what each term of a loss weighs in it
split_layers.py  the scale and the drift of layers that are split over ranks
clipping.py      whether gradients are clipped when they are whole
replay.py        whether that is the gradient of one process; how far batch norm couples samples
replicas.py      whether the ranks hold the same model
evaluation.py    what an evaluation counts
averages.py      results that are averaged over the ranks, and are no means
collectives.py   whether the ranks call the same, and where a run that hangs stands
randomness.py    whose random numbers
schedule.py      how often the learning rate changes, and by what number
saving.py        which rank writes which file
speed.py         what costs time for nothing
"""

from __future__ import annotations

from collections.abc import Callable

from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings
from everyrank.audit.rules.averages import check_averages
from everyrank.audit.rules.batches import check_batches
from everyrank.audit.rules.clipping import check_clipping
from everyrank.audit.rules.collectives import check_collectives
from everyrank.audit.rules.data import check_data
from everyrank.audit.rules.evaluation import check_evaluation
from everyrank.audit.rules.gradients import check_gradients
from everyrank.audit.rules.randomness import check_randomness
from everyrank.audit.rules.replay import check_replay
from everyrank.audit.rules.replicas import check_replicas
from everyrank.audit.rules.saving import check_saving
from everyrank.audit.rules.schedule import check_schedule
from everyrank.audit.rules.speed import check_speed
from everyrank.audit.rules.split_layers import check_split_layers

__all__ = ["RULES"]

RULES: tuple[Callable[[Evidence, Findings], None], ...] = (
    check_collectives,
    check_data,
    check_batches,
    check_replicas,
    check_gradients,
    check_split_layers,
    check_clipping,
    check_replay,
    check_evaluation,
    check_averages,
    check_randomness,
    check_schedule,
    check_saving,
    check_speed,
)
"""In the order in which they are asked."""
