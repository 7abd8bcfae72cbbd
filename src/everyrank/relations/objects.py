"""State of the script's own objects: statistics are the same on all ranks, and counters are in the checkpoint."""

from __future__ import annotations

from everyrank.audit.finding import Findings
from everyrank.audit.source_lines import attribute_of, definitions_of, is_read, method_of
from everyrank.relations.numbers import relative_difference
from everyrank.rerun import RankRecording, ScriptRecording

__all__ = ["judge_counters", "judge_statistics", "lines_of_state"]

_APART = 1e-3  # rounding is far below
_CONSTANT = 1e-9


def judge_statistics(many: ScriptRecording, findings: Findings) -> None:
    """Compare running means and variances that no module holds between ranks which train the same model.

    Needs no run on one rank, so scripts without a loader are judged, too, for example those that act in environments.
    """
    first, *others = many.ranks
    if not others or findings.has("ranks.state", "replicas."):
        return
    num_updates = min(len(rank.updates) for rank in many.ranks)
    for update in range(1, num_updates):
        ranks = [rank.updates[update] for rank in many.ranks]
        held = [(rank.before.get(name), value) for rank in ranks for name, value in ranks[0].before.items()]
        if any(
            one is None or one.shape != other.shape or relative_difference(one, other) > _APART for one, other in held
        ):
            return  # ranks with different models, or shards, may have statistics of their own
        for name, (_, kind, attribute) in first.facts.get("state_lines", {}).items():
            values = [rank.states.get(name) for rank in ranks]
            before = first.updates[update - 1].states.get(name)
            if before is None or any(value is None or value.shape != before.shape for value in values):
                continue
            is_constant = relative_difference(before, values[0]) < _CONSTANT
            apart = max(relative_difference(value, values[0]) for value in values[1:])
            if is_constant or apart < _APART:
                continue
            lines = lines_of_state(first, name)
            findings.add(
                "WARN",
                "ranks.state",
                lines[0] if lines else ranks[0].step,
                f"after update {update}, {kind}.{attribute} differs between the ranks by {apart:.2g} of its norm, "
                f"although the model is the same: these statistics are those of each rank's own samples",
                "all-reduce the sums and the counts that it is computed from",
                also=lines[1:],
            )
            return


def lines_of_state(rank: RankRecording, name: str) -> tuple[str, ...]:
    """The lines that assign to a state of the script's own object, and what they use; () for one of a module."""
    if name not in rank.facts.get("state_lines", {}):
        return ()
    lines = attribute_of(*rank.facts["state_lines"][name])
    return tuple(dict.fromkeys(each for line in lines for each in (line, *definitions_of(line))))


def judge_counters(rank: RankRecording, findings: Findings) -> None:
    """Find a number that an object counts up and uses, and that its `state_dict` leaves out."""
    for path, kind, attribute, save in rank.facts.get("left_out", []):
        if is_read(path, kind, attribute):
            lines = (*method_of(path, kind, "state_dict"), *attribute_of(path, kind, attribute), save)
            findings.add(
                "WARN",
                "save.counter",
                lines[0],
                f"the checkpoint lacks {kind}.{attribute}, which grows with each update and is used: after a resume it "
                f"begins again",
                f"add it to state_dict() of {kind}, and read it in load_state_dict()",
                also=lines[1:],
            )
