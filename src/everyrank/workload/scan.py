"""Find the names that a Python file defines, without running it.

A training script without a workload is refused before it starts.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["defines", "workload_names"]


def defines(path: Path, name: str) -> bool:
    """Whether running the file would define `name` at its top level.

    Assignments in branches, loops and `try` blocks count, and those of functions that declare the name `global`.
    `from other import *` counts if `other` is found without running code, and defines the name.
    Returns True for a file that is not Python, because importing it gives a better error.

    >>> defines(Path("my_workload.py"), "workload")
    True
    """
    return _defines(path, name, set())


def workload_names(path: Path) -> list[str]:
    """Return the top-level names of workloads, in order; [] for a file that is not Python.

    They are assigned from `Workload(...)`, or functions that return one.
    """
    tree = _parse(path)
    names: list[str] = []
    for statement in _top_level(tree) if tree is not None else ():
        if isinstance(statement, ast.Assign | ast.AnnAssign) and _calls_workload(statement.value):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
        elif isinstance(statement, ast.FunctionDef) and any(
            isinstance(node, ast.Return) and _calls_workload(node.value) for node in ast.walk(statement)
        ):
            names.append(statement.name)
    return names


def _calls_workload(value: ast.expr | None) -> bool:
    function = value.func if isinstance(value, ast.Call) else None
    return (isinstance(function, ast.Name) and function.id == "Workload") or (
        isinstance(function, ast.Attribute) and function.attr == "Workload"
    )


def _defines(path: Path, name: str, visited_files: set[Path]) -> bool:
    tree = _parse(path)
    if tree is None:
        return True
    visited_files.add(path)
    bound_names = set[str]()
    for statement in _top_level(tree):
        bound_names.update(_names_bound_by(statement))
        if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*" and not name.startswith("_"):
            file = _imported_file(path, statement)
            if file is not None and file not in visited_files and _defines(file, name, visited_files):
                return True
    # __getattr__ of a module may define any name
    return name in bound_names or "__getattr__" in bound_names or _is_global_of_a_function(tree, name)


def _is_global_of_a_function(tree: ast.Module, name: str) -> bool:
    return any(isinstance(node, ast.Global) and name in node.names for node in ast.walk(tree))


def _parse(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _top_level(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield all statements outside functions and classes, nested ones included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            yield from _top_level(child)


def _names_bound_by(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that this statement binds, without those of statements inside it."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    elif not (isinstance(statement, ast.AnnAssign) and statement.value is None):
        for child in ast.iter_child_nodes(statement):
            yield from _assigned_names(child)


def _assigned_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that an expression, a `with` item, a pattern or an `except` clause assigns."""
    if isinstance(node, ast.stmt | ast.Lambda):
        return
    if isinstance(node, ast.comprehension):  # its targets exist only inside the comprehension
        yield from (*_assigned_names(node.iter), *(name for test in node.ifs for name in _assigned_names(test)))
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.MatchMapping) and node.rest is not None:
        yield node.rest
    elif isinstance(node, ast.MatchAs | ast.MatchStar | ast.ExceptHandler) and node.name is not None:
        yield node.name
    for child in ast.iter_child_nodes(node):
        yield from _assigned_names(child)


def _imported_file(path: Path, statement: ast.ImportFrom) -> Path | None:
    """Return the file that `from module import *` reads: relative to `path`, or an installed one. None if not found."""
    folder = path.parent
    for _ in range(statement.level - 1):
        folder = folder.parent
    parts = statement.module.split(".") if statement.module else []
    file = _module_file(folder, parts)
    if file is not None or statement.level:
        return file
    try:
        spec = importlib.util.find_spec(parts[0])
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if len(parts) == 1:
        return Path(spec.origin) if spec.origin is not None and spec.origin.endswith(".py") else None
    # find_spec of a dotted name would import its package
    files = (_module_file(Path(folder), parts[1:]) for folder in spec.submodule_search_locations or ())
    return next((file for file in files if file is not None), None)


def _module_file(folder: Path, parts: Sequence[str]) -> Path | None:
    """Return the file of the module with this dotted name in a folder, or None."""
    path = folder.joinpath(*parts)
    files = [path / "__init__.py", *([path.with_suffix(".py")] if parts else [])]
    return next((file for file in files if file.is_file()), None)
