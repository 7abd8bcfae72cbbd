"""Checks that the optimizer updates the trained parameters, and that an averaged copy changes once per update."""

from __future__ import annotations

from everyrank.audit.finding import Findings
from everyrank.rerun import RankRecording

__all__ = ["judge_updates"]


def judge_updates(rank: RankRecording, findings: Findings) -> None:
    """Check the optimizer's parameters, and copies of the model such as averages, in each update."""
    _judge_dead_parameters(rank, findings)
    _judge_copies(rank, findings)
    _judge_counted_steps(rank, findings)


def _judge_dead_parameters(rank: RankRecording, findings: Findings) -> None:
    dead = rank.facts.get("dead")
    if not dead:
        return
    location, num_dead, total, unstepped = dead
    findings.add(
        "FAIL",
        "weights.not-stepped",
        location,
        f"{num_dead} of {total} parameters of the optimizer belong to no module and have no gradient, while "
        f"{len(unstepped)} parameters of the model have one and are not stepped, for example {unstepped[0]}",
        "construct the optimizer from the parameters of the model after it was wrapped, and before its first forward",
    )


def _judge_counted_steps(rank: RankRecording, findings: Findings) -> None:
    """Report an optimizer that counts a step without a gradient, which makes Adam's first update smaller."""
    location, count, step = rank.facts.get("counted", ["", 0.0, ""])
    if count:
        findings.add(
            "WARN",
            "optimizer.counted",
            location,
            f"a step with zero gradients before the first backward counts: the first update is number "
            f"{count + 1:g} for the optimizer, so its bias correction is too small",
            "set the learning rate and the weight decay to 0 for that step, and state['step'] to 0 after it",
            other_lines=(step,),
        )


def _judge_copies(rank: RankRecording, findings: Findings) -> None:
    """Report copies that change between the backwards of one update, while the parameters do not change."""
    moves: dict[str, dict[int, set[int]]] = {}
    for update, backwards, location, *_ in rank.facts.get("copies_moved", []):
        moves.setdefault(location, {}).setdefault(update, set()).add(backwards)
    names = {location: name for _, _, location, name, *_ in rank.facts.get("copies_moved", [])}
    callers = {location: tuple(callers) for _, _, location, _, *callers in rank.facts.get("copies_moved", [])}
    for location, by_update in moves.items():
        repeated = [update for update, positions in by_update.items() if len(positions) > 1]
        if len(repeated) < 2:
            continue
        max_moves = max(len(by_update[update]) for update in repeated)
        findings.add(
            "WARN",
            "average.often",
            location,
            f"{names[location]}, in a copy of the model, changes {max_moves} times per update although the parameters "
            f"change once: its decay is applied per micro-batch",
            "update the copy only after optimizer.step()",
            other_lines=callers[location],
        )
        return
