"""Checks that activation checkpointing changes no gradient and no state, by repeating the first update without it."""

from __future__ import annotations

from everyrank.audit.finding import Findings
from everyrank.relations.numbers import relative_difference, tolerance_of
from everyrank.rerun import RankRecording, RecordedUpdate

__all__ = ["judge_recomputation"]


def judge_recomputation(single: RankRecording, without_checkpointing: RankRecording, findings: Findings) -> None:
    """Compare the gradients of the first update with and without activation checkpointing."""
    if not (single.updates and without_checkpointing.updates):
        return
    first, other = single.updates[0], without_checkpointing.updates[0]
    tolerance = tolerance_of([*first.gradients.values(), *(value.tensor for value in single.values.values())])
    if tolerance is None or len(first.losses) != len(other.losses):
        return
    differences = {
        name: relative_difference(gradient, other.gradients[name])
        for name, gradient in first.gradients.items()
        if gradient is not None
        and other.gradients.get(name) is not None
        and gradient.shape == other.gradients[name].shape
    }
    worst = max(differences, key=lambda name: differences[name], default=None)
    lines = single.facts["checkpointing"]
    if worst is None or differences[worst] <= 100 * tolerance:
        _judge_states(first, other, lines, 100 * tolerance, findings)
        return
    findings.add(
        "FAIL",
        "recompute.gradient",
        lines[0],
        f"activation checkpointing changes the gradient of {worst} by {differences[worst]:.2g} of its norm: the second "
        f"forward computes different values from the first, for example with different dropout masks",
        "leave preserve_rng_state at its default (True), and change no state inside the checkpointed function",
        other_lines=tuple(lines[1:]),
    )


def _judge_states(
    first: RecordedUpdate, other: RecordedUpdate, lines: list[str], tolerance: float, findings: Findings
) -> None:
    """Compare the buffers after the update, because the second forward updates running statistics again."""
    changed = [
        name
        for name, state in first.states.items()
        if (other_state := other.states.get(name)) is not None
        and other_state.shape == state.shape
        and state.numel()
        and relative_difference(state, other_state) > tolerance
    ]
    if changed:
        findings.add(
            "WARN",
            "recompute.state",
            lines[0],
            f"activation checkpointing changes {len(changed)} buffers, such as {changed[0]}: the second forward "
            f"updates them again, for example the running statistics of batch norm",
            "keep layers that change a buffer, such as batch norm, outside of the checkpointed function",
            other_lines=tuple(lines[1:]),
        )
