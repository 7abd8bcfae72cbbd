"""EditedScript: a script with its edits, and queries of its text that several edits use."""

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
    """A remedy does not fit the script; the message is the reason."""


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
        """The script's name for torch.distributed; adds an import if it has none."""
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
        """Return the script's name for `module.name`; adds an import if it has none."""
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.ImportFrom) and node.module and module.startswith(node.module):
                for alias in node.names:
                    if alias.name == name:
                        return alias.asname or name
        self._import(f"from {module} import {name}")
        return name

    def free_name(self, name: str) -> str:
        """Return this name, with a number if the script already uses it."""
        used_names = {node.id for node in ast.walk(self.source.tree) if isinstance(node, ast.Name)}
        names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        return next(each for each in names if each not in used_names)

    def _import(self, line: str) -> None:
        if line not in self.imports:
            self.imports.append(line)

    # --- nodes of the script

    def statement_at(self, line: int) -> ast.stmt:
        """Return the innermost statement that holds a line."""
        statements = [
            node for node in ast.walk(self.source.tree) if isinstance(node, ast.stmt) and holds_line(node, line)
        ]
        if not statements:
            raise CannotRepairError(f"no statement at line {line}")
        return max(statements, key=lambda node: (node.lineno, node.col_offset))

    def calls_at(self, line: int, *names: str) -> list[ast.Call]:
        """Return the calls in the statement at a line whose function has one of these last names (any if none)."""
        statement = self.statement_at(line)
        calls = [
            node
            for node in _own_nodes(statement)
            if isinstance(node, ast.Call) and (not names or self.last_name(node) in names)
        ]
        calls.sort(key=lambda call: (not (call.lineno <= line <= (call.end_lineno or line)), call.lineno))
        return calls

    def call_at(self, line: int, *names: str) -> ast.Call:
        """Return the first of `calls_at`. Raises `CannotRepairError` if there is none."""
        calls = self.calls_at(line, *names)
        if not calls:
            raise CannotRepairError(f"line {line} does not call {' or '.join(names) or 'a function'}")
        return calls[0]

    def calls_of(self, *names: str, within: ast.AST | None = None) -> list[ast.Call]:
        """Return all calls of functions with one of these last names."""
        return [
            node
            for node in ast.walk(within or self.source.tree)
            if isinstance(node, ast.Call) and self.last_name(node) in names
        ]

    def last_name(self, call: ast.Call) -> str:
        """Return `backward` for `loss.backward()`."""
        return self.source.code(call.func).rpartition(".")[2].strip()

    def keyword(self, call: ast.Call, name: str) -> ast.keyword | None:
        """Return a keyword argument of a call."""
        return next((argument for argument in call.keywords if argument.arg == name), None)

    def assigned_values(self, name: str, within: ast.AST) -> list[ast.expr]:
        """Return the values that are assigned to a name, also in `a, b = 0, []`."""
        values: list[ast.expr] = []
        for store in self.source.stores(name, within):
            statement, parent = self.source.statement(store), self.source.parents[store]
            value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
            if isinstance(parent, ast.Tuple) and isinstance(value, ast.Tuple) and len(parent.elts) == len(value.elts):
                value = value.elts[next(index for index, each in enumerate(parent.elts) if each is store)]
            values += [value] if value is not None else []
        return values

    def dataset_of(self, loader: ast.Call) -> ast.expr:
        """Return the dataset argument of a DataLoader. Raises `CannotRepairError` if it is not written out."""
        dataset = self.keyword(loader, "dataset")
        if loader.args and not isinstance(loader.args[0], ast.Starred):
            return loader.args[0]
        if dataset is None:
            raise CannotRepairError("the call of DataLoader does not name its dataset")
        return dataset.value

    def loop_around(self, line: int) -> ast.For:
        """Return the innermost `for` loop of the same function that holds this line."""
        statement = self.statement_at(line)
        loops = [statement, *self.source.loops(statement)]
        for loop in loops:
            if isinstance(loop, ast.For):
                return loop
        raise CannotRepairError(f"no for loop around line {line}")

    # --- edits of several remedies

    def remove_argument(self, call: ast.Call, argument: ast.expr | ast.keyword, reason: str) -> None:
        """Remove an argument with the comma before it; the first one with the comma after it."""
        arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        arguments.sort(key=lambda other: (other.lineno, other.col_offset))
        index = arguments.index(argument)
        start, end = start_of(argument), end_of(argument)
        if index > 0:
            start = end_of(arguments[index - 1])
        elif len(arguments) > 1:
            end = start_of(arguments[1])
        self.source.edit(start, end, "", reason)

    def remove_statement(self, statement: ast.stmt, reason: str) -> None:
        """Remove the lines of a statement. Raises `CannotRepairError` if it is alone in its block or shares a line."""
        if len(self.source.block(statement)) < 2 or self.source.shares_line(statement):
            raise CannotRepairError(
                f"line {statement.lineno} cannot be removed: it is alone in its block, or has several statements"
            )
        end = (statement.end_lineno or statement.lineno) + 1
        self.source.edit((statement.lineno, 0), (end, 0), "", reason)


def line_of(location: str, script: Path) -> int:
    """Return the line of a location, FILE:LINE; 0 if it is not in the script."""
    file, _, line = location.rpartition(":")
    return int(line) if line.isdigit() and Path(file).resolve() == script.resolve() else 0


def line_of_finding(finding: Finding) -> int:
    """Return the line of a finding in the script."""
    return int(finding.location.rpartition(":")[2])


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement, without those of the blocks in it."""
    for node in ast.iter_child_nodes(statement):
        if not isinstance(node, ast.stmt):
            yield from ast.walk(node)


def name_of_loader(script: EditedScript, call: ast.Call) -> str:
    """Return the name to which a loader is assigned; "" if there is none."""
    statement = script.source.statement(call)
    is_assigned = isinstance(statement, ast.Assign) and statement.value is call
    return script.source.code(statement.targets[0]) if is_assigned else ""  # type: ignore[attr-defined]


def loader_of_loop(script: EditedScript, loop: ast.For) -> str:
    """Return the loader in `for batch in enumerate(tqdm(loader))`; "" if it has no name."""
    node: ast.expr = loop.iter
    while isinstance(node, ast.Call) and node.args:
        node = node.args[0]
    return script.source.code(node) if isinstance(node, ast.Name | ast.Attribute) else ""
