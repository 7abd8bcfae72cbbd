"""Whether a script can be imported without running its training, parsing arguments or reading input."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from everyrank.port.facts import Fact
from everyrank.port.source import ScriptSource
from everyrank.port.to_workload.slices import loaded_names, nodes_in

__all__ = ["READS_INPUT", "is_importable"]

READS_INPUT = re.compile(r"parse_args|parse_known_args|ArgumentParser|open\(|load\(|input\(|sys\.argv")


def is_importable(source: ScriptSource, script: Path, events: Sequence[Fact]) -> bool:
    """Whether the script can be imported without running a training, parsing arguments or reading input."""
    if not script.stem.isidentifier() or script.stem in sys.stdlib_module_names:
        return False
    guards = [node for node in source.tree.body if _is_guard(node)]
    for node in source.tree.body:
        is_allowed = isinstance(
            node,
            ast.Import
            | ast.ImportFrom
            | ast.FunctionDef
            | ast.ClassDef
            | ast.AsyncFunctionDef
            | ast.Assign
            | ast.AnnAssign,
        ) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        if node not in guards and not is_allowed:
            return False
        if node not in guards and _reads_input(source, _run_at_import(node), set()):
            return False
    if not guards:
        return False
    return all(
        any(guard.lineno <= event.chain[-1].span[0] <= (guard.end_lineno or 0) for guard in guards)
        for event in events
        if event.kind not in ("torch_seed", "seed", "draw")
    )


def _run_at_import(node: ast.stmt) -> list[ast.AST]:
    """Return the parts of a statement that run when its module is imported. The body of a function does not."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [*node.decorator_list, *node.args.defaults, *(each for each in node.args.kw_defaults if each)]
    if isinstance(node, ast.ClassDef):
        header = [*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)]
        return [*header, *(part for each in node.body for part in _run_at_import(each))]
    return [node]


def _reads_input(source: ScriptSource, nodes: Sequence[ast.AST], seen: set[str]) -> bool:
    """Whether code, or a function or class of the script that it calls, parses arguments or reads a file."""
    if any(READS_INPUT.search(source.code(node)) for node in nodes):
        return True
    called = [each.func for each in nodes_in(nodes) if isinstance(each, ast.Call)]
    names = {name for node in called for name in loaded_names(node)} - seen
    seen |= names
    definitions = [
        node
        for node in source.tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name in names
    ]
    return bool(definitions) and _reads_input(source, definitions, seen)


def _is_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and any(
        isinstance(each, ast.Name) and each.id == "__name__" for each in ast.walk(node.test)
    )
