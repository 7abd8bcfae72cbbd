"""What holds within one update: the optimizer steps what was trained, and an averaged copy moves once."""

from __future__ import annotations

from everyrank.audit.finding import Findings
from everyrank.rerun import RankRecording

__all__ = ["judge_updates"]


def judge_updates(rank: RankRecording, findings: Findings) -> None:
    """Look at the optimizer's parameters and at copies of the model, such as averaged ones, in each update."""
    _dead_parameters(rank, findings)
    _copies(rank, findings)
    _counted_steps(rank, findings)


def _dead_parameters(rank: RankRecording, findings: Findings) -> None:
    dead = rank.facts.get("dead")
    if not dead:
        return
    place, number, total, trained = dead
    findings.add(
        "FAIL",
        "weights.not-stepped",
        place,
        f"{number} of {total} parameters of the optimizer belong to no module and have no gradient, while "
        f"{len(trained)} parameters of the model have one and are not stepped, for example {trained[0]}",
        "make the optimizer from the parameters that the model has after it was wrapped, and before its first forward",
    )


def _counted_steps(rank: RankRecording, findings: Findings) -> None:
    """Report an optimizer that counts a step without a gradient: Adam's first update is then a smaller one."""
    place, count, step = rank.facts.get("counted", ["", 0.0, ""])
    if count:
        findings.add(
            "WARN",
            "optimizer.counted",
            place,
            f"a step with gradients of zero, before the first backward, is counted: the first update is number "
            f"{count + 1:g} for the optimizer, whose bias correction is then too small",
            "set the learning rate and the weight decay to 0 for that step, and state['step'] to 0 after it",
            also=(step,),
        )


def _copies(rank: RankRecording, findings: Findings) -> None:
    """Report copies that move between the backwards of one update, while the parameters stay the same."""
    moves: dict[str, dict[int, set[int]]] = {}
    for update, backwards, place, *_ in rank.facts.get("copies_moved", []):
        moves.setdefault(place, {}).setdefault(update, set()).add(backwards)
    names = {place: name for _, _, place, name, *_ in rank.facts.get("copies_moved", [])}
    callers = {place: tuple(callers) for _, _, place, _, *callers in rank.facts.get("copies_moved", [])}
    for place, by_update in moves.items():
        repeated = [update for update, positions in by_update.items() if len(positions) > 1]
        if len(repeated) < 2:
            continue
        most = max(len(by_update[update]) for update in repeated)
        findings.add(
            "WARN",
            "average.often",
            place,
            f"{names[place]}, in a copy of the model, moves {most} times per update although the parameters change "
            f"once: its decay is applied per micro-batch",
            "update the copy only after optimizer.step()",
            also=callers[place],
        )
        return
