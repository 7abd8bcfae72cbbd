"""Which rank writes which file, and what a checkpoint leaves out."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from everyrank.audit.events import OptimizerStep, Save
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings

__all__ = ["check_saving"]


def check_saving(evidence: Evidence, findings: Findings) -> None:
    """Paths by rank. What is only added to, or written by one rank, is right."""
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
                f"{len(lines)} ranks write the same file {Path(path).name}: it may be torn, or a mixture",
                "if dist.get_rank() == 0: torch.save(...); then dist.barrier()",
            )
    if not writers:
        findings.not_checked("checkpoints: no torch.save in the part that ran")
    _check_content(evidence, findings)


def _check_content(evidence: Evidence, findings: Findings) -> None:
    """A checkpoint with an optimizer is one to go on from: what else the script has must be in it."""
    for event in evidence.all_of(Save):
        names = " ".join(event.keys).lower()
        if "optim" in names:
            scales = any(step.loss_scale != 1.0 for step in evidence.of(event.rank, OptimizerStep))
            rates = {tuple(step.rates) for step in evidence.of(event.rank, OptimizerStep)}
            if scales and "scaler" not in names:
                text = "the checkpoint has the optimizer, and not the gradient scaler"
                findings.add("WARN", "save.scaler", event.line, text, '"scaler": scaler.state_dict()')
            if len(rates) > 1 and not any(word in names for word in ("sched", "epoch", "step", "iter", "lr")):
                text = "the learning rate changes, and the checkpoint does not say how far the schedule is"
                findings.add("WARN", "save.schedule", event.line, text, '"schedule": schedule.state_dict()')
