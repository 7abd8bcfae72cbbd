"""The rules: each file finds one kind of mistake. A rule is a function that reads the evidence and adds findings.

data.py          samples that ranks repeat, skip or read in the same order
batches.py       batches that are divided twice
gradients.py     whether the gradient of an optimizer step is the sum over backwards and ranks
loss_terms.py    the weight of each loss term in that gradient
split_layers.py  scale and drift of layers that are split over ranks
clipping.py      clipping of gradients that are not averaged yet, still multiplied by the loss scale, or used already
replay.py        the gradient compared with its replay in one process; the effect of batch norm
replicas.py      parameters and buffers that differ between ranks
evaluation.py    samples that an evaluation counts twice, leaves out, or weights wrongly
averages.py      averages over ranks of results that are not means
collectives.py   collectives that differ between ranks, and the line where each rank of a hanging run is blocked
randomness.py    random numbers that are equal on ranks or workers
schedule.py      learning-rate schedules that step too often, or by different metrics
saving.py        files that several ranks write, and incomplete checkpoints
speed.py         unnecessary communication and waiting

CONTRIBUTING has a section on how to add one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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

__all__ = ["RULES", "Rule"]


class Rule(NamedTuple):
    """A row of the table of rules.

    check             the function that adds findings
    explains_failure  names of findings that explain why a script failed, so that a failed script is judged, too
    """

    check: Callable[[Evidence, Findings], None]
    explains_failure: tuple[str, ...] = ()


RULES = (
    Rule(check_collectives, explains_failure=("collective.order",)),
    Rule(check_data),
    Rule(check_batches),
    Rule(check_replicas),
    Rule(check_gradients),
    Rule(check_split_layers),
    Rule(check_clipping),
    Rule(check_replay),
    Rule(check_evaluation),
    Rule(check_averages),
    Rule(check_randomness),
    Rule(check_schedule),
    Rule(check_saving),
    Rule(check_speed),
)
"""In the order in which they run: a rule may read the findings of the rules before it."""
