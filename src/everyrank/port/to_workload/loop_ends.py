"""Finds the lines of the training loops that a workload does not have: early ends, skipped batches, other backwards."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any

from everyrank.port.facts import Fact
from everyrank.port.source import NotPortedError, start_of
from everyrank.port.to_workload.changing_names import loops_around, repeated_statements, steady_values
from everyrank.port.to_workload.slices import Frames, Script, bound_names, root_name, taken_statements

__all__ = ["note_loop_ends", "note_other_backwards", "refuse_changed_model"]

_Values = dict[str, list[Any]]


def note_loop_ends(script: Script, backward: Fact, changing: Iterable[str], notes: list[tuple[int, str]]) -> None:
    """Note each `break`, `continue` and `return` that may end the training early or leave out a batch."""
    frames = Frames(script, backward.chain)
    for depth in range(len(frames.scopes)):
        values = steady_values(frames, depth, changing)
        for number, loop in enumerate(loops_around(frames, depth)):
            is_batch_loop, call = not depth and not number, frames.calls[depth]
            for line, keyword in _ends(loop.body, values, is_own_loop=True):
                if keyword == "continue" and (call is None or line > start_of(call)[0]):
                    continue
                if keyword == "continue":
                    sentence = f"`continue` skips {'batches' if is_batch_loop else 'epochs'}; a workload skips none"
                elif is_batch_loop and keyword == "break":
                    sentence = "`break` may end an epoch early; a workload trains on all batches"
                else:
                    sentence = f"`{keyword}` may end the training early; a workload trains for all its epochs"
                if all(line != other for other, _ in notes):
                    notes.append((line, sentence))


def _ends(statements: Iterable[ast.stmt], values: _Values, is_own_loop: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, keyword) of the statements that leave a loop or skip the rest of its body.

    is_own_loop  whether the statements are not in a loop in the loop, which a `break` would end
    """
    for statement in taken_statements(statements, values):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(statement, ast.Return):
            yield statement.lineno, "return"
        elif isinstance(statement, ast.Break | ast.Continue) and is_own_loop:
            yield statement.lineno, type(statement).__name__.lower()
        is_inner_loop = isinstance(statement, ast.For | ast.While)
        yield from _ends(getattr(statement, "body", []), values, is_own_loop and not is_inner_loop)
        for block in (
            *(getattr(statement, name, []) for name in ("orelse", "finalbody")),
            *(handler.body for handler in getattr(statement, "handlers", [])),
        ):
            yield from _ends(block, values, is_own_loop)


def note_other_backwards(script: Script, backward: Fact, changing: Iterable[str], notes: list[tuple[int, str]]) -> None:
    """Note each other backward of the script that the first updates did not reach."""
    source, frames = script.source, Frames(script, backward.chain)
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "backward":
            continue
        if node is source.at(backward.span, ast.Call):
            continue
        scope = source.scope(node)
        depth = frames.scopes.index(scope) if scope in frames.scopes else len(frames.scopes)
        values = steady_values(frames, depth, changing)
        if source.statement(node) in _taken(scope.body, values):
            notes.append(
                (node.lineno, "this backward did not run in the compared updates; the workload does not have it")
            )


def _taken(statements: Iterable[ast.stmt], values: _Values) -> Iterator[ast.stmt]:
    """Yield the statements, also those in blocks, without branches that are not taken."""
    for statement in taken_statements(statements, values):
        yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from _taken(getattr(statement, name, []), values)
        for handler in getattr(statement, "handlers", []):
            yield from _taken(handler.body, values)


def refuse_changed_model(script: Script, backward: Fact, model_id: int, changing: Iterable[str]) -> None:
    """Raise `NotPortedError` if the training assigns attributes of the model, or freezes or unfreezes parameters."""
    frames = Frames(script, backward.chain)
    for depth in range(len(frames.scopes)):
        values, inputs = steady_values(frames, depth, ()), set[str]() if depth else _names_of_a_batch(frames)
        for statement in repeated_statements(frames, depth, changing):
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                continue
            for node in ast.walk(statement):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    root, word = root_name(node), node.attr
                    if root in values and values[root][2] == model_id:
                        raise NotPortedError(
                            node.lineno,
                            f"the training changes the model, {ast.unparse(node)}; a workload has the same model in "
                            "all updates: train by hand",
                        )
                elif isinstance(node, ast.Call):
                    root, word = root_name(node.func), getattr(node.func, "attr", getattr(node.func, "id", ""))
                else:
                    continue
                if root not in inputs and ("requires_grad" in word or "freeze" in word):
                    raise NotPortedError(
                        node.lineno,
                        "the training freezes or unfreezes parameters; a workload trains the same parameters in all "
                        "updates: do it before the loop, or train by hand",
                    )


def _names_of_a_batch(frames: Frames) -> set[str]:
    """Return the names that the batch loop assigns, such as inputs that need a gradient."""
    loops = loops_around(frames, 0)
    if not loops:
        return set()
    nodes = [*ast.walk(loops[0]), loops[0].target] if isinstance(loops[0], ast.For) else list(ast.walk(loops[0]))
    return {name for node in nodes if isinstance(node, ast.Assign | ast.expr) for name in bound_names(node)} - {
        name
        for node in nodes
        if isinstance(node, ast.For) and node is not loops[0]
        for name in bound_names(node.target)
    }
