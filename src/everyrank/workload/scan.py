"""Find the names that a Python file defines without running it, to refuse plain training scripts before they start."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

__all__ = ["defines", "names_of_workloads"]


def defines(path: Path, name: str) -> bool:
    """Whether running the file would define `name` at its top level.

    All branches, loops and `try` blocks count, and `from other import *` if the other file defines the name. Returns
    True for a file that is not Python, because importing it gives a better error.

    >>> defines(Path("my_workload.py"), "workload")
    True
    """
    return _defines(path, name, set())


def names_of_workloads(path: Path) -> list[str]:
    """Return the top-level names assigned from `Workload(...)`, in order; [] for a file that is not Python."""
    tree = _parse(path)
    return [
        target.id
        for statement in (_top_level(tree) if tree is not None else ())
        if isinstance(statement, ast.Assign | ast.AnnAssign) and _calls_workload(statement.value)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Name)
    ]


def _calls_workload(value: ast.expr | None) -> bool:
    function = value.func if isinstance(value, ast.Call) else None
    return (isinstance(function, ast.Name) and function.id == "Workload") or (
        isinstance(function, ast.Attribute) and function.attr == "Workload"
    )


def _defines(path: Path, name: str, seen: set[Path]) -> bool:
    tree = _parse(path)
    if tree is None:
        return True
    seen.add(path)
    bound = set[str]()
    for statement in _top_level(tree):
        bound.update(_bound_by(statement))
        if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*" and not name.startswith("_"):
            other = _imported_file(path, statement)
            if other is not None and other not in seen and _defines(other, name, seen):
                return True
    # __getattr__ of a module may define any name
    return name in bound or "__getattr__" in bound


def _parse(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _top_level(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements that bind names of the module, not those inside functions and classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            yield from _top_level(child)


def _bound_by(statement: ast.stmt) -> Iterator[str]:
    """Return the names that one statement binds, without those of statements inside it."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    elif not (isinstance(statement, ast.AnnAssign) and statement.value is None):
        for child in ast.iter_child_nodes(statement):
            yield from _stored(child)


def _stored(node: ast.AST) -> Iterator[str]:
    """Return the names that an expression, a `with` item or a pattern assigns."""
    if isinstance(node, ast.stmt | ast.Lambda):
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.MatchAs | ast.MatchStar | ast.ExceptHandler) and node.name is not None:
        yield node.name
    for child in ast.iter_child_nodes(node):
        yield from _stored(child)


def _imported_file(path: Path, statement: ast.ImportFrom) -> Path | None:
    """Return the file that `from module import *` reads: next to `path`, or an installed one."""
    folder = path.parent
    for _ in range(statement.level - 1):
        folder = folder.parent
    parts = (statement.module or "").split(".") if statement.module else []
    path_in_folder = folder.joinpath(*parts)
    for file in (
        path_in_folder / "__init__.py",
        *([path_in_folder.with_name(f"{path_in_folder.name}.py")] if parts else []),
    ):
        if file.is_file():
            return file
    if statement.level or len(parts) != 1:  # finding a dotted name would import its package
        return None
    try:
        spec = importlib.util.find_spec(parts[0])
    except (ImportError, ValueError):
        return None
    origin = spec.origin if spec is not None else None
    return Path(origin) if origin is not None and origin.endswith(".py") else None
