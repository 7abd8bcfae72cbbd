"""Lines of the user's source that decide about a line: its condition, what it uses, what its function returns.

A rule sees the line at which a mistake takes effect. These lines, which belong to the same function, often have the
mistake itself. Reads the source, and runs nothing.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

__all__ = [
    "argument_lines",
    "argument_of",
    "attribute_of",
    "definitions_of",
    "guards_of",
    "is_read",
    "method_of",
    "returns_of",
    "skips_of",
]

_MOST = 6  # lines; more would hide the one that matters


def guards_of(place: str) -> tuple[str, ...]:
    """The `if` that decides whether a line runs, and the assignments of the names in it; () if there is none.

    Example:
        guards_of("train.py:12")  # ("train.py:11", "train.py:9") for `if is_last:` and `is_last = i % 4 == 0`

    """
    path, line = _split(place)
    function = _function_at(path, line)
    if function is None:
        return ()
    branches = [node for node in _own_nodes(function) if isinstance(node, ast.If) and _is_in(node.body, line)]
    if not branches:
        return ()
    inner = max(branches, key=lambda node: node.lineno)
    lines = [inner.lineno, *_assignments(function, _names(inner.test), inner.lineno)]
    return _places(path, lines)


def definitions_of(place: str) -> tuple[str, ...]:
    """The last two assignments, in the same function, of each name that the statement at a line uses.

    Then those of the names that these assignments use.
    """
    path, line = _split(place)
    function = _function_at(path, line)
    if function is None:
        return ()
    first = _assigned_before(function, line)
    return _places(path, [*first, *(each for one in first for each in _assigned_before(function, one))])


def _assigned_before(function: ast.AST, line: int) -> list[int]:
    statements = [node for node in _own_nodes(function) if isinstance(node, ast.stmt) and _covers(node, line)]
    if not statements:
        return []
    statement = max(statements, key=lambda node: node.lineno)
    return _assignments(function, _names(statement), statement.lineno)


def returns_of(place: str) -> tuple[str, ...]:
    """The lines that return a value from the function with this line."""
    path, line = _split(place)
    function = _function_at(path, line)
    if function is None or isinstance(function, ast.Module):
        return ()
    returns = [node.lineno for node in _own_nodes(function) if isinstance(node, ast.Return) and node.value is not None]
    return _places(path, returns)


def argument_of(place: str, name: str) -> tuple[str, ...]:
    """The line of a keyword argument in the call at a line, which may have several lines."""
    path, line = _split(place)
    tree = _tree(path)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _covers(node, line)] if tree else []
    return _places(path, [word.value.lineno for call in calls for word in call.keywords if word.arg == name])


def argument_lines(place: str) -> tuple[str, ...]:
    """The lines of the arguments of the calls at a line, which may have several lines."""
    path, line = _split(place)
    tree = _tree(path)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _covers(node, line)] if tree else []
    return _places(
        path, [each.lineno for call in calls for each in (*call.args, *(word.value for word in call.keywords))]
    )


def attribute_of(path: str, class_name: str, attribute: str) -> tuple[str, ...]:
    """The lines that assign to `self.attribute` in methods of a class other than its constructor."""
    lines = [
        node.lineno
        for method in _methods(path, class_name)
        if method.name != "__init__"
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and node.attr == attribute and not isinstance(node.ctx, ast.Load)
    ]
    return _places(path, lines)


def is_read(path: str, class_name: str, attribute: str) -> bool:
    """Whether a method of a class uses `self.attribute`, other than to count or to save it."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Load)
        for method in _methods(path, class_name)
        if method.name not in ("state_dict", "load_state_dict", "__repr__", "extra_repr")
        for node in ast.walk(method)
    )


def method_of(path: str, class_name: str, name: str) -> tuple[str, ...]:
    """The lines at which a method of a class returns."""
    methods = [method for method in _methods(path, class_name) if method.name == name]
    return _places(path, [node.lineno for each in methods for node in ast.walk(each) if isinstance(node, ast.Return)])


def _methods(path: str, class_name: str) -> list[ast.FunctionDef]:
    tree = _tree(path)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)] if tree else []
    return [
        method
        for each in classes
        if each.name == class_name
        for method in each.body
        if isinstance(method, ast.FunctionDef)
    ]


def skips_of(place: str) -> tuple[str, ...]:
    """The conditions under which the loop at a line goes on to its next batch by `continue`."""
    path, line = _split(place)
    tree = _tree(path)
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and node.lineno == line] if tree else []
    skips = [
        node.lineno
        for loop in loops
        for node in ast.walk(loop)
        if isinstance(node, ast.If) and any(isinstance(each, ast.Continue) for each in node.body)
    ]
    return _places(path, skips)


def _split(place: str) -> tuple[str, int]:
    path, _, line = place.rpartition(":")
    return path, int(line) if line.isdigit() else 0


def _places(path: str, lines: list[int]) -> tuple[str, ...]:
    return tuple(f"{path}:{line}" for line in dict.fromkeys(lines))[:_MOST]


@functools.cache
def _tree(path: str) -> ast.Module | None:
    try:
        return ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _function_at(path: str, line: int) -> ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The innermost function with this line, else the whole file."""
    tree = _tree(path)
    if tree is None or not line:
        return None
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    around = [node for node in ast.walk(tree) if isinstance(node, kinds) and _covers(node, line)]
    return max(around, key=lambda node: node.lineno, default=tree)


def _own_nodes(function: ast.AST) -> list[ast.AST]:
    """The nodes of a function without those of functions inside it, in the order of their lines."""
    nodes, waiting = list[ast.AST](), list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)
    return sorted(nodes, key=lambda node: getattr(node, "lineno", 0))


def _covers(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", line + 1) <= line <= (getattr(node, "end_lineno", None) or 0)


def _is_in(body: list[ast.stmt], line: int) -> bool:
    return any(_covers(statement, line) for statement in body)


def _names(node: ast.AST) -> set[str]:
    """The variables that a statement reads; of a block only those in its first line."""
    inner = [node]
    if isinstance(node, ast.For | ast.While | ast.If | ast.With):
        inner = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]
    return {
        each.id
        for part in inner
        for each in ast.walk(part)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
    }


def _assignments(function: ast.AST, names: set[str], before: int) -> list[int]:
    """The last two assignments of each name above a line, the nearest first."""
    lines: dict[str, list[int]] = {}
    for node in _own_nodes(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in names and node.lineno < before:
            lines.setdefault(node.id, []).append(node.lineno)
    return sorted({line for of_name in lines.values() for line in of_name[-2:]}, reverse=True)
