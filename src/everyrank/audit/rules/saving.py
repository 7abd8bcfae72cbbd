"""Finds files that several ranks write, and checkpoints that lack the gradient scaler or the schedule."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from everyrank.audit.events import OptimizerStep, Save
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings

__all__ = ["check_saving"]

_OPTIMIZER = re.compile(r"optim(?!al|um|ized|ised|ization|isation)")  # the key of an optimizer; not "optimal_threshold"


def check_saving(evidence: Evidence, findings: Findings) -> None:
    """Find files that several ranks save, and incomplete checkpoints."""
    writers: dict[str, dict[int, str]] = defaultdict(dict)
    for rank in evidence.ranks:
        for event in evidence.of(rank, Save):
            writers[event.path][rank] = event.line
    for path, lines in writers.items():
        if len(lines) > 1:
            findings.add(
                "FAIL",
                "save.race",
                next(iter(lines.values())),
                f"{len(lines)} ranks write the same file {Path(path).name} at once, which may corrupt it",
                "save on one rank: if dist.get_rank() == 0: torch.save(...); then dist.barrier() on all",
            )
    if not writers:
        findings.add_unchecked("checkpoints: the part of the script that ran calls no torch.save")
    _check_content(evidence, findings)


def _check_content(evidence: Evidence, findings: Findings) -> None:
    """Check that a checkpoint with an optimizer also has the gradient scaler and the schedule, if there are any."""
    for event in evidence.all_of(Save):
        names = " ".join(event.keys).lower()
        if _OPTIMIZER.search(names):
            scales = any(step.loss_scale != 1.0 for step in evidence.of(event.rank, OptimizerStep))
            if scales and "scaler" not in names:
                text = "the checkpoint has the optimizer, but not the gradient scaler"
                findings.add("WARN", "save.scaler", event.line, text, 'add "scaler": scaler.state_dict()')
            if _has_schedule(evidence, event.rank) and not any(
                word in names for word in ("sched", "epoch", "step", "iter", "lr")
            ):
                text = "the learning rate changes, but the checkpoint does not have the state of the schedule"
                findings.add("WARN", "save.schedule", event.line, text, 'add "schedule": schedule.state_dict()')


def _has_schedule(evidence: Evidence, rank: int) -> bool:
    """Whether the learning rates change. Several optimizers, as of a GAN, may have different ones in turn."""
    rates_by_line: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for step in evidence.of(rank, OptimizerStep):
        rates_by_line[step.line].append(tuple(step.rates))
    return any(
        len(rates) > 1 and set(rates[: len(rates) // 2]) != set(rates[len(rates) // 2 :])
        for rates in rates_by_line.values()
    )
