"""Checks that statistics of the script's own objects are equal on all ranks, and counters are in the checkpoint."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from everyrank.audit.data_flow import read_source
from everyrank.audit.finding import Findings
from everyrank.relations.numbers import relative_difference
from everyrank.rerun import RankRecording, ScriptRecording

__all__ = ["judge_counters", "judge_statistics", "lines_of_state"]

_MAX_DIFFERENCE = 1e-3  # much larger than rounding
_CONSTANT_TOLERANCE = 1e-9


def judge_statistics(many: ScriptRecording, findings: Findings) -> None:
    """Compare running means and variances of the script's own objects between ranks that train the same model.

    This needs no run on one rank, so it also works for scripts without a loader, such as reinforcement learning.
    """
    first, *others = many.ranks
    if not others or findings.has("ranks.state", "replicas."):
        return
    num_updates = min(len(rank.updates) for rank in many.ranks)
    for update in range(1, num_updates):
        ranks = [rank.updates[update] for rank in many.ranks]
        parameter_pairs = [(rank.before.get(name), value) for rank in ranks for name, value in ranks[0].before.items()]
        if any(
            first_parameter is None
            or first_parameter.shape != second_parameter.shape
            or relative_difference(first_parameter, second_parameter) > _MAX_DIFFERENCE
            for first_parameter, second_parameter in parameter_pairs
        ):
            return  # ranks with different models, or with shards, may have different statistics
        for name, (_, class_name, attribute) in first.facts.get("state_lines", {}).items():
            values = [rank.states.get(name) for rank in ranks]
            before = first.updates[update - 1].states.get(name)
            if before is None or any(value is None or value.shape != before.shape for value in values):
                continue
            is_constant = relative_difference(before, values[0]) < _CONSTANT_TOLERANCE
            difference = max(relative_difference(value, values[0]) for value in values[1:])
            if is_constant or difference < _MAX_DIFFERENCE:
                continue
            lines = lines_of_state(first, name)
            findings.add(
                "WARN",
                "ranks.state",
                lines[0] if lines else ranks[0].step,
                f"after update {update}, {class_name}.{attribute} differs between the ranks by {difference:.2g} of its "
                f"norm, although the model is the same, because each rank uses the statistics of its local samples",
                "all-reduce the sums and the counts from which it is computed",
                other_lines=lines[1:],
            )
            return


def lines_of_state(rank: RankRecording, name: str) -> tuple[str, ...]:
    """The lines that change a state of a script's own object, or of a module in the file that trains it."""
    if name not in rank.facts.get("state_lines", {}):
        path = rank.updates[0].step.rpartition(":")[0] if rank.updates else ""
        source = read_source(path)
        attribute = name.rpartition(": ")[2].rpartition(".")[2]
        changes = source.changes_of(attribute) if source is not None else []
        return tuple(f"{path}:{each.line}" for each in changes)
    return _assigned_at(*rank.facts["state_lines"][name])


def judge_counters(rank: RankRecording, findings: Findings) -> None:
    """Find counters that an object uses and that its `state_dict` leaves out."""
    for path, class_name, attribute, save in rank.facts.get("missing_counters", []):
        if _is_read(path, class_name, attribute):
            lines = (*_returned_at(path, class_name, "state_dict"), *_assigned_at(path, class_name, attribute), save)
            findings.add(
                "WARN",
                "save.counter",
                lines[0],
                f"the checkpoint lacks {class_name}.{attribute}, which grows with each update and is used: a resumed "
                f"training starts with its initial value",
                f"add it to state_dict() of {class_name}, and read it in load_state_dict()",
                other_lines=lines[1:],
            )


def _methods(path: str, class_name: str) -> Iterator[ast.FunctionDef]:
    """The methods of a class of the script."""
    source = read_source(path)
    class_node = source.classes.get(class_name) if source is not None else None
    yield from (each for each in class_node.body if isinstance(each, ast.FunctionDef)) if class_node is not None else ()


def _assigned_at(path: str, class_name: str, attribute: str) -> tuple[str, ...]:
    """The lines that assign to `self.attribute` in methods of a class other than its constructor."""
    nodes = [node for each in _methods(path, class_name) if each.name != "__init__" for node in ast.walk(each)]
    lines = [node.lineno for node in nodes if isinstance(node, ast.Attribute) and _is_stored(node, attribute)]
    return tuple(f"{path}:{line}" for line in dict.fromkeys(lines))


def _is_stored(node: ast.Attribute, attribute: str) -> bool:
    return node.attr == attribute and not isinstance(node.ctx, ast.Load)


def _is_read(path: str, class_name: str, attribute: str) -> bool:
    """Whether a method of a class uses `self.attribute` for more than counting or saving it."""
    state_methods = ("state_dict", "load_state_dict", "__repr__", "extra_repr")
    nodes = [node for each in _methods(path, class_name) if each.name not in state_methods for node in ast.walk(each)]
    return any(
        isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Load) for node in nodes
    )


def _returned_at(path: str, class_name: str, name: str) -> tuple[str, ...]:
    """The lines at which a method of a class returns."""
    nodes = [node for each in _methods(path, class_name) if each.name == name for node in ast.walk(each)]
    return tuple(f"{path}:{node.lineno}" for node in nodes if isinstance(node, ast.Return))
