"""Audits a script by comparison: checks relations that hold for every correct training.

compare.py    runs the script again for each relation, and collects the differences
ranks.py      N ranks compute the same gradients, parameters, learning rates and states as one rank
numbers.py    joins the shards of ranks, and compares tensors up to rounding
printed.py    printed numbers of rank 0 equal those of one rank with all samples
shown_variables.py  finds the variables that a printed number comes from
lines.py      finds the first line of the script whose result differs from that of one rank
recompute.py  activation checkpointing changes no gradient
kept_script.py  saves the results of a script in a file, to compare a later version of the script with it
samples.py    ranks read different samples of a stream in an epoch
same.py       different settings give the same training
resume.py     a resumed training equals an uninterrupted one
workers.py    a loader reads the same samples with and without workers
schedule.py   the learning rate depends on the progress of the training, not on the number of ranks
updates.py    an optimizer updates the trained parameters, and an averaged copy changes once per update
objects.py    statistics and counters of the script's own objects are synchronised and saved
precision.py  16-bit parameters do not round updates away
"""

from everyrank.relations.compare import (
    RelationResults,
    audit_by_relations,
    compare_script,
    joined_findings,
    judge_script,
    why_not_compared,
    with_comparison,
    with_resume,
    with_settings,
)
from everyrank.relations.resume import ResumeCommand, resume_command

__all__ = [
    "RelationResults",
    "ResumeCommand",
    "audit_by_relations",
    "compare_script",
    "joined_findings",
    "judge_script",
    "resume_command",
    "why_not_compared",
    "with_comparison",
    "with_resume",
    "with_settings",
]
