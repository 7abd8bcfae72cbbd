"""A script with the edits that were made to it, and questions about its text that several edits ask."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

from everyrank.audit import Finding
from everyrank.errors import CannotRunError
from everyrank.port.source import ScriptSource, end_of, holds_line, start_of

__all__ = [
    "CannotRepairError",
    "EditedScript",
    "line_of",
    "line_of_finding",
    "loader_of_loop",
    "name_of_loader",
]


class CannotRepairError(CannotRunError):
    """A remedy that does not fit the script, with the reason."""


class EditedScript:
    """A script and its edits.

    source   the script with its edits
    helpers  names of functions of `everyrank.port.helpers` that the edits call
    imports  lines that the edits need at the top
    """

    def __init__(self, text: str) -> None:
        self.source = ScriptSource(text)
        self.helpers: set[str] = set()
        self.imports: list[str] = []

    # --- names in the script

    @property
    def dist(self) -> str:
        """How the script calls torch.distributed; imported if it has no name for it."""
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name == "torch.distributed":
                        return alias.asname or "torch.distributed"
            elif isinstance(node, ast.ImportFrom) and node.module == "torch":
                for alias in node.names:
                    if alias.name == "distributed":
                        return alias.asname or "distributed"
        self._import("import torch.distributed as dist")
        return "dist"

    def imported(self, module: str, name: str) -> str:
        """How the script calls `module.name`; imported if it has no name for it."""
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.ImportFrom) and node.module and module.startswith(node.module):
                for alias in node.names:
                    if alias.name == name:
                        return alias.asname or name
        self._import(f"from {module} import {name}")
        return name

    def free_name(self, name: str) -> str:
        """This name, or one with a number that the script does not use."""
        used = {node.id for node in ast.walk(self.source.tree) if isinstance(node, ast.Name)}
        names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        return next(each for each in names if each not in used)

    def _import(self, line: str) -> None:
        if line not in self.imports:
            self.imports.append(line)

    # --- places in the script

    def statement_at(self, line: int) -> ast.stmt:
        """Return the innermost statement that holds a line."""
        holding = [node for node in ast.walk(self.source.tree) if isinstance(node, ast.stmt) and holds_line(node, line)]
        if not holding:
            raise CannotRepairError(f"no statement at line {line}")
        return max(holding, key=lambda node: (node.lineno, node.col_offset))

    def calls_at(self, line: int, *names: str) -> list[ast.Call]:
        """Calls in the statement at a line whose function has one of these last names; all calls without names."""
        statement = self.statement_at(line)
        calls = [
            node
            for node in _own_nodes(statement)
            if isinstance(node, ast.Call) and (not names or self.last_name(node) in names)
        ]
        calls.sort(key=lambda call: (not (call.lineno <= line <= (call.end_lineno or line)), call.lineno))
        return calls

    def call_at(self, line: int, *names: str) -> ast.Call:
        """The first of these calls. Raises `CannotRepairError` if there is none."""
        calls = self.calls_at(line, *names)
        if not calls:
            raise CannotRepairError(f"line {line} does not call {' or '.join(names) or 'a function'}")
        return calls[0]

    def calls_of(self, *names: str, within: ast.AST | None = None) -> list[ast.Call]:
        """All calls of functions with one of these last names."""
        return [
            node
            for node in ast.walk(within or self.source.tree)
            if isinstance(node, ast.Call) and self.last_name(node) in names
        ]

    def last_name(self, call: ast.Call) -> str:
        """`backward` for `loss.backward()`."""
        return self.source.code(call.func).rpartition(".")[2].strip()

    def keyword(self, call: ast.Call, name: str) -> ast.keyword | None:
        """Return a keyword argument of a call."""
        return next((word for word in call.keywords if word.arg == name), None)

    def loop_around(self, line: int) -> ast.For:
        """Return the innermost `for` loop of the same function that holds a line, or begins there."""
        statement = self.statement_at(line)
        loops = [statement, *self.source.loops(statement)]
        for loop in loops:
            if isinstance(loop, ast.For):
                return loop
        raise CannotRepairError(f"no for loop around line {line}")

    # --- edits that several remedies make

    def remove_argument(self, call: ast.Call, argument: ast.expr | ast.keyword, reason: str) -> None:
        """Remove an argument with the comma before it, or after it if it is the first."""
        arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        arguments.sort(key=lambda each: (each.lineno, each.col_offset))
        index = arguments.index(argument)
        start, end = start_of(argument), end_of(argument)
        if index > 0:
            start = end_of(arguments[index - 1])
        elif len(arguments) > 1:
            end = start_of(arguments[1])
        self.source.edit(start, end, "", reason)

    def remove_statement(self, statement: ast.stmt, reason: str) -> None:
        """Remove a statement with its lines. Raises `CannotRepairError` if it is the only one of its block."""
        if len(self.source.block(statement)) < 2 or self.source.shares_line(statement):
            raise CannotRepairError(f"line {statement.lineno} cannot be removed by itself")
        end = (statement.end_lineno or statement.lineno) + 1
        self.source.edit((statement.lineno, 0), (end, 0), "", reason)


def line_of(place: str, script: Path) -> int:
    """Return the line of a place in the script; 0 for a place in another file, or none."""
    file, _, line = place.rpartition(":")
    return int(line) if line.isdigit() and Path(file).resolve() == script.resolve() else 0


def line_of_finding(finding: Finding) -> int:
    """Return the line of a finding that stands in the script."""
    return int(finding.place.rpartition(":")[2])


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement without those of the blocks inside of it."""
    for node in ast.iter_child_nodes(statement):
        if not isinstance(node, ast.stmt):
            yield from ast.walk(node)


def name_of_loader(script: EditedScript, call: ast.Call) -> str:
    """Return the name that a loader is assigned to; "" if there is none."""
    statement = script.source.statement(call)
    is_assigned = isinstance(statement, ast.Assign) and statement.value is call
    return script.source.code(statement.targets[0]) if is_assigned else ""  # type: ignore[attr-defined]


def loader_of_loop(script: EditedScript, loop: ast.For) -> str:
    """Return the loader in `for batch in enumerate(tqdm(loader))`; "" if it has no name."""
    node: ast.expr = loop.iter
    while isinstance(node, ast.Call) and node.args:
        node = node.args[0]
    return script.source.code(node) if isinstance(node, ast.Name | ast.Attribute) else ""
