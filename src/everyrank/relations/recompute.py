"""Activation checkpointing changes no gradient: the first update again, with the activations kept."""

from __future__ import annotations

from everyrank.audit.finding import Findings
from everyrank.relations.numbers import relative_difference, tolerance_of
from everyrank.rerun import RankRecording

__all__ = ["judge_recomputation"]


def judge_recomputation(one: RankRecording, kept: RankRecording, findings: Findings) -> None:
    """Compare the gradients of the first update with and without activation checkpointing, on one batch."""
    if not (one.updates and kept.updates):
        return
    first, other = one.updates[0], kept.updates[0]
    tolerance = tolerance_of([*first.gradients.values(), *(value.tensor for value in one.values.values())])
    if tolerance is None or len(first.losses) != len(other.losses):
        return
    apart = {
        name: relative_difference(gradient, other.gradients[name])
        for name, gradient in first.gradients.items()
        if gradient is not None
        and other.gradients.get(name) is not None
        and gradient.shape == other.gradients[name].shape
    }
    worst = max(apart, key=lambda name: apart[name], default=None)
    if worst is None or apart[worst] <= 100 * tolerance:
        return
    lines = one.facts["checkpointing"]
    findings.add(
        "FAIL",
        "recompute.gradient",
        lines[0],
        f"activation checkpointing changes the gradient of {worst} by {apart[worst]:.2g} of its norm: the second "
        f"forward computes something else than the first, for example with other dropout masks",
        "leave preserve_rng_state at its default (True), and change no state inside of the checkpointed function",
        also=tuple(lines[1:]),
    )
