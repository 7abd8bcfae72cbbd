"""Audit by comparison: relations that hold for every correct training, whatever it trains.

compare.py    runs the script again for each relation, and collects what differs
ranks.py      N ranks are one: gradients, parameters, learning rates, states and printed numbers
numbers.py    puts the shards of ranks together, and compares up to rounding
printed.py    numbers that rank 0 shows
lines.py      the first line of the script whose result is not that of one rank
recompute.py  activation checkpointing changes no gradient
kept_script.py  what a script computes, kept in a file for a later version of it
samples.py    ranks read different samples of one stream in an epoch
same.py       other settings that should be the same training
resume.py     stopping and resuming changes nothing
workers.py    workers of a loader read the samples that the process itself reads
schedule.py   the learning rate depends on the progress of the training, not on the number of ranks
updates.py    an optimizer steps what was trained, and an averaged copy moves once per update
objects.py    statistics and counters of the script's own objects
precision.py  updates that 16-bit parameters round away
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
