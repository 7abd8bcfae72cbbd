"""Finds updates that 16-bit parameters round away: steps that do not change an element although they should."""

from __future__ import annotations

from everyrank.audit.finding import Findings
from everyrank.rerun import RankRecording

__all__ = ["judge_rounded_updates"]

_MAX_LOST_SHARE = 0.5


def judge_rounded_updates(rank: RankRecording, findings: Findings) -> None:
    """Count the elements of 16-bit parameters that have a gradient and do not change in any recorded step."""
    import torch

    updates = [update for update in rank.updates if update.before and update.after]
    if len(updates) < 3:
        return
    first, last = updates[0], updates[-1]
    moved = total = 0
    for name, before in first.before.items():
        after = last.after.get(name)
        gradients = [update.gradients.get(name) for update in updates]
        if before.dtype not in (torch.bfloat16, torch.float16) or after is None or any(g is None for g in gradients):
            continue
        if after.shape != before.shape or any(g is None or g.shape != before.shape for g in gradients):
            continue
        has_gradient = torch.stack([gradient != 0 for gradient in gradients]).all(0)
        total += int(has_gradient.sum())
        moved += int((has_gradient & (after != before)).sum())
    if total < 100 or moved > (1 - _MAX_LOST_SHARE) * total or not any(first.rates):
        return
    findings.add(
        "WARN",
        "precision.rounded-away",
        first.step,
        f"{total - moved:,} of {total:,} elements of 16-bit parameters did not change in {len(updates)} updates, "
        f"although each had a gradient: the steps (learning rate {first.rates[0]:g}) are smaller than the parameters' "
        "precision",
        "keep the parameters in float32 and compute in bfloat16 (autocast, MixedPrecisionPolicy), or "
        "round stochastically",
        other_lines=tuple(line for lines in rank.facts.get("constructed_at", {}).values() for line in lines),
    )
