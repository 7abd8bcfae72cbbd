"""Finds the variables and objects that the loops around the backward change.

The file of a workload has their values of the first update only, so code that reads one of them is refused.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from everyrank.port.facts import Fact
from everyrank.port.source import end_of, start_of
from everyrank.port.to_workload.slices import (
    Frames,
    Script,
    bound_names,
    loaded_names,
    object_changed_by,
    taken_statements,
)

__all__ = ["changed_objects", "changing_names", "loops_around", "repeated_statements", "steady_values"]

# functions whose result depends only on their arguments
_PURE = {"abs", "bool", "float", "int", "len", "list", "max", "min", "range", "round", "str", "sum", "tuple"}
_Values = dict[str, list[Any]]
_Loop = ast.For | ast.While


@dataclasses.dataclass(frozen=True)
class _Binding:
    """A statement that binds names; `reads` are the names in it, and in the tests and loops around it."""

    statement: ast.stmt
    names: set[str]
    reads: set[str]


def changing_names(script: Script, backward: Fact) -> dict[str, int]:
    """Return name -> line for the variables that the training changes, as the function with the backward sees them.

    They are loop variables, names that a loop computes from them or from an earlier epoch or batch, and parameters
    that get such a value.
    """
    frames = Frames(script, backward.chain)
    changed_ids = {identity for identity, _ in changed_objects(script, backward, None)}
    enclosing = _changed_by_functions(script.source.tree)
    visible = dict(enclosing)
    for depth in reversed(range(len(frames.scopes))):
        scope = frames.scopes[depth]
        shared = {
            name for node in ast.walk(scope) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names
        }
        local_names = {*frames.parameters(depth), *(name for each in scope.body for name in bound_names(each))} - shared
        start = {name: line for name, line in enclosing.items() if name not in local_names}
        for name in frames.parameters(depth):
            argument, call = frames.argument(name, depth)
            if argument is not None and call is not None and loaded_names(argument) & visible.keys():
                start[name] = call.lineno
        values = {
            name: value for name, value in steady_values(frames, depth, ()).items() if value[2] not in changed_ids
        }
        visible = _changed_in(frames, depth, start, shared, values)
        if scope in script.source.ancestors(frames.scopes[0]):
            enclosing = visible
        else:
            enclosing = enclosing | {name: line for name, line in visible.items() if name in shared}
    return visible


def loops_around(frames: Frames, depth: int) -> list[_Loop]:
    """Return the loops of a scope around the call that leads to the backward, the innermost first."""
    call = frames.calls[depth]
    return frames.script.source.loops(call) if call is not None else []


def repeated_statements(frames: Frames, depth: int, changing: Iterable[str] | None) -> Iterator[ast.stmt]:
    """Yield the statements of a scope that run several times, without blocks and without branches that do not run.

    changing  names that do not decide a branch; None for all names
    """
    values = {} if changing is None else steady_values(frames, depth, changing)
    for statement, _ in _flat(_region(frames, depth), values, set()):
        if not isinstance(statement, ast.For | ast.While | ast.If | ast.With | ast.Try):
            yield statement


def steady_values(frames: Frames, depth: int, changing: Iterable[str]) -> _Values:
    """Return the recorded values of the variables that a scope can read, without those that change."""
    left_out = set(changing)
    return {name: value for name, value in {**frames.globals, **frames.values(depth)}.items() if name not in left_out}


def _region(frames: Frames, depth: int) -> Sequence[ast.stmt]:
    """Return the outermost loop of a scope around the backward; all statements of a function that a loop calls."""
    is_repeated = any(loops_around(frames, outer) for outer in range(depth + 1, len(frames.scopes)))
    return frames.scopes[depth].body if is_repeated else loops_around(frames, depth)[-1:]


def _changed_in(
    frames: Frames, depth: int, start: dict[str, int], shared: set[str], recorded: _Values
) -> dict[str, int]:
    """Return name -> line for the names of a scope that change, with the names in `start`, which change before it.

    shared    names that the function shares with the scopes around it: `global step`
    recorded  the values of numbers, and of objects that do not change
    """
    loops = loops_around(frames, depth)
    for loop in loops:
        if isinstance(loop, ast.For):
            start = start | dict.fromkeys(bound_names(loop.target), loop.lineno)
    changing: dict[str, int] = {}
    values: _Values = {}  # at first no branch is left out
    for _ in range(2):
        changing = dict(start)
        bindings = [
            _Binding(statement, names, reads | _reads(statement))
            for statement, reads in _flat(_region(frames, depth), values, set())
            if (names := _names_bound_here(statement))
        ]
        for each in bindings:
            is_in_loop = bool(loops) and start_of(loops[-1]) < start_of(each.statement) < end_of(loops[-1])
            kept = each.names if is_in_loop else each.names & shared
            earlier = kept if _is_after(frames, depth, loops, each.statement) else kept & each.reads
            computed = {
                name
                for name in each.names
                if recorded.get(name, [""])[0] == "literal" and not _is_plain(each.statement, recorded)
            }
            changing |= dict.fromkeys(earlier | computed, each.statement.lineno)
        changing = _with_results(changing, bindings)
        values = steady_values(frames, depth, changing)
    return changing


def _with_results(changing: dict[str, int], bindings: Sequence[_Binding]) -> dict[str, int]:
    """Return `changing` with the names that are computed from its names."""
    while True:
        results = {
            name: each.statement.lineno
            for each in bindings
            if each.reads & changing.keys()
            for name in each.names - changing.keys()
        }
        if not results:
            return changing
        changing = changing | results


def _flat(statements: Iterable[ast.stmt], values: _Values, reads: set[str]) -> Iterator[tuple[ast.stmt, set[str]]]:
    """Yield the statements, also those in blocks, with the names that the tests and loops around them read.

    Branches that `values` decide and that are not taken are left out.
    """
    for statement in taken_statements(statements, values):
        yield statement, reads
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        heads = [head for name in ("test", "iter") if (head := getattr(statement, name, None)) is not None]
        is_block = isinstance(statement, ast.If | ast.While | ast.For)
        inner = reads | {name for head in heads for name in loaded_names(head)} if is_block else reads
        blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        blocks += [handler.body for handler in getattr(statement, "handlers", [])]
        for block in blocks:
            yield from _flat(block, values, inner)


def _names_bound_here(statement: ast.stmt) -> set[str]:
    """Return the names that a statement binds; of a loop or `with`, those of its first line."""
    if isinstance(statement, ast.For):
        return bound_names(statement.target)
    if isinstance(statement, ast.With):
        return {name for item in statement.items for name in bound_names(item)}
    if isinstance(statement, ast.If | ast.While | ast.Try | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return set()
    return bound_names(statement)


def _reads(statement: ast.stmt) -> set[str]:
    """Return the names that a statement reads; of a loop or `with`, those of its first line."""
    if isinstance(statement, ast.For):
        return loaded_names(statement.iter)
    if isinstance(statement, ast.With):
        return {name for item in statement.items for name in loaded_names(item.context_expr)}
    return loaded_names(statement) | (bound_names(statement) if isinstance(statement, ast.AugAssign) else set())


def _is_after(frames: Frames, depth: int, loops: Sequence[_Loop], statement: ast.stmt) -> bool:
    """Whether a statement is in the batch loop, or after the call that leads to the backward."""
    call = frames.calls[depth]
    position = loops[0] if loops and not depth else call
    return position is not None and start_of(statement) > start_of(position)


def _is_plain(statement: ast.stmt, values: _Values) -> bool:
    """Whether a value is computed only from values that do not change: `1 / len(loader)`, `2 * args.beta`."""
    value = getattr(statement, "value", None)
    if not isinstance(value, ast.expr):
        return True
    calls = [node for node in ast.walk(value) if isinstance(node, ast.Call)]
    measured = {name for call in calls if ast.unparse(call.func) == "len" for name in loaded_names(call)}
    functions = {ast.unparse(call.func) for call in calls}
    if not all(each in _PURE or each.startswith(("math.", "os.path.")) for each in functions):
        return False
    return all(name in measured | _PURE | {"math", "os"} or name in values for name in loaded_names(value))


def _changed_by_functions(tree: ast.Module) -> dict[str, int]:
    """Return name -> line for the global variables that a function computes from themselves: `step += 1`."""
    changed: dict[str, int] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            shared = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
            for statement, _ in _flat(function.body, {}, set()):
                names = _names_bound_here(statement) & _reads(statement) & shared
                changed |= dict.fromkeys(names, statement.lineno)
    return changed


def changed_objects(script: Script, backward: Fact, changing: Iterable[str] | None) -> dict[tuple[int, str], int]:
    """Return (identity, attribute) -> line for the objects that the training changes, in branches that run.

    The attribute is "" for a whole object: `criterion.alpha = 1`, `annealer.step()`, `state["step"] += 1`. It is
    "beta" for `args.beta = 1` of parsed arguments.
    """
    frames = Frames(script, backward.chain)
    changed: dict[tuple[int, str], int] = {}
    for depth in range(len(frames.scopes)):
        values = steady_values(frames, depth, ())
        for statement in repeated_statements(frames, depth, changing):
            for name, attribute in object_changed_by(statement):
                value = values.get(name, ["", "", 0])
                if value[0] == "namespace" and attribute:
                    changed.setdefault((value[2], attribute), statement.lineno)
                elif value[0] == "object":
                    changed.setdefault((value[2], ""), statement.lineno)
    return changed
