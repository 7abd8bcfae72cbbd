"""Activation checkpointing changes no gradient and no state: the first update again, with the activations kept."""

from __future__ import annotations

from everyrank.audit.finding import Findings
from everyrank.relations.numbers import relative_difference, tolerance_of
from everyrank.rerun import RankRecording, RecordedUpdate

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
    lines = one.facts["checkpointing"]
    if worst is None or apart[worst] <= 100 * tolerance:
        _judge_states(first, other, lines, 100 * tolerance, findings)
        return
    findings.add(
        "FAIL",
        "recompute.gradient",
        lines[0],
        f"activation checkpointing changes the gradient of {worst} by {apart[worst]:.2g} of its norm: the second "
        f"forward computes something else than the first, for example with other dropout masks",
        "leave preserve_rng_state at its default (True), and change no state inside of the checkpointed function",
        also=tuple(lines[1:]),
    )


def _judge_states(
    first: RecordedUpdate, other: RecordedUpdate, lines: list[str], tolerance: float, findings: Findings
) -> None:
    """Compare the buffers after the update: the second forward updates running statistics once more."""
    changed = [
        name
        for name, state in first.states.items()
        if (kept := other.states.get(name)) is not None
        and kept.shape == state.shape
        and state.numel()
        and relative_difference(state, kept) > tolerance
    ]
    if changed:
        findings.add(
            "WARN",
            "recompute.state",
            lines[0],
            f"activation checkpointing changes {len(changed)} buffers, such as {changed[0]}: the second forward "
            f"updates them again, as it does the running statistics of batch norm",
            "keep layers that change a buffer, such as batch norm, outside of the checkpointed function",
            also=tuple(lines[1:]),
        )
