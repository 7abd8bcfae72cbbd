"""Finds expressions in the text of a script by position and edits them. No other byte changes."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from everyrank.errors import CannotRunError

__all__ = ["Edit", "NotPortedError", "ScriptSource", "end_of", "holds_line", "parameter_names", "start_of"]

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


class NotPortedError(CannotRunError):
    """A script cannot be ported: the line, the reason, and what to do by hand."""

    def __init__(self, line: int, reason: str, location: str = "") -> None:
        super().__init__(f"{location or f'line {line}'}: {reason}")
        self.line, self.reason = line, reason


@dataclasses.dataclass(frozen=True)
class Edit:
    """New text for the bytes between two positions (line from 1, column in bytes), which are equal for an insertion.

    reason  one sentence for the user; "" for an edit that belongs to another edit
    """

    start: tuple[int, int]
    end: tuple[int, int]
    text: str
    reason: str


class ScriptSource:
    """A script and the edits that were made to it.

    text   the text of the file
    tree   its syntax tree
    edits  the edits in the order in which they were made
    """

    def __init__(self, text: str) -> None:
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self.text = text if text.endswith("\n") else text + self.newline
        self.lines = self.text.encode().splitlines(keepends=True)
        self.tree = ast.parse(self.text)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.edits: list[Edit] = []
        self._smallest_nodes: dict[Any, ast.AST | None] = {}
        self.unit = self._indentation()

    def _indentation(self) -> str:
        """Return one level of the script's indentation: spaces or a tab."""
        for node in ast.walk(self.tree):
            body = getattr(node, "body", None)
            if isinstance(node, ast.stmt) and isinstance(body, list) and body and body[0].lineno > node.lineno:
                inner, outer = self.indent(body[0]), self.indent(node)
                if inner.startswith(outer) and inner != outer:
                    return inner[len(outer) :]
        return "    "

    # --- finding

    def at(self, span: Sequence[int], kind: type[ast.AST] | tuple[type[ast.AST], ...] = ast.Call) -> ast.AST | None:
        """Return the smallest node of a kind around [first line, column, last line, column]; None if there is none."""
        key = (*span, kind)
        if key not in self._smallest_nodes:  # a loop of the script evaluates each expression many times
            self._smallest_nodes[key] = self._smallest(span, kind)
        return self._smallest_nodes[key]

    def _smallest(self, span: Sequence[int], kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> ast.AST | None:
        line, column, last_line, last_column = span
        enclosing = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, kind)
            and hasattr(node, "lineno")
            and start_of(node) <= (line, column)
            and (last_line, last_column) <= end_of(node)
        ]
        return min(
            enclosing,
            key=lambda node: (end_of(node)[0] - start_of(node)[0], end_of(node)[1] - start_of(node)[1]),
            default=None,
        )

    def ancestors(self, node: ast.AST | None) -> Iterator[ast.AST]:
        """Yield the node, its parent, and so on."""
        while node is not None:
            yield node
            node = self.parents.get(node)

    def around(self, node: ast.AST | None, *kinds: type[ast.AST]) -> ast.AST | None:
        """Return the nearest node of one of these kinds among the node and its ancestors."""
        return next((each for each in self.ancestors(node) if isinstance(each, kinds)), None)

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement that a node belongs to."""
        statement = self.around(node, ast.stmt)
        assert isinstance(statement, ast.stmt)
        return statement

    def outer_statement(self, statement: ast.stmt) -> ast.stmt | None:
        """Return the statement around a statement, also from the branches of `try` and `match`; None in the module."""
        outer = self.around(self.parents[statement], ast.stmt)
        return outer if isinstance(outer, ast.stmt) else None

    def scope(self, node: ast.AST) -> Scope:
        """Return the function whose body a node is in, or the module."""
        function = self.around(self.parents.get(node), ast.FunctionDef, ast.AsyncFunctionDef)
        return function if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) else self.tree

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the block of statements that holds a statement."""
        parent = self.parents[statement]  # also a branch of `try` or `match`
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(parent, name, [])
            if isinstance(statements, list) and statement in statements:
                return statements
        return [statement]

    def loops(self, node: ast.AST) -> list[ast.For | ast.While]:
        """Return the loops of the same function around a node, the innermost first."""
        scope = self.scope(node)
        return [
            each
            for each in self.ancestors(node)
            if isinstance(each, ast.For | ast.While) and each is not node and self.scope(each) is scope
        ]

    def code(self, node: ast.AST) -> str:
        """Return the text of a node."""
        if not hasattr(node, "lineno"):
            return ""
        (line, column), (last_line, last_column) = start_of(node), end_of(node)
        # ast.get_source_segment splits the whole text each time
        if line == last_line:
            return self.lines[line - 1][column:last_column].decode()
        between = self.lines[line : last_line - 1]
        raw = b"".join([self.lines[line - 1][column:], *between, self.lines[last_line - 1][:last_column]])
        return raw.decode().replace("\r\n", "\n")

    def stores(self, name: str, within: ast.AST) -> list[ast.AST]:
        """Return the nodes that assign to a name, which may be an attribute such as `self.model`."""
        return [
            node
            for node in ast.walk(within)
            if isinstance(node, ast.Name | ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and self.code(node) == name
        ]

    def is_in_brackets(self, node: ast.AST) -> bool:
        """Whether round brackets enclose exactly this expression, as in `(loss / 2).backward()`."""
        start, end = start_of(node), end_of(node)
        before, after = self.lines[start[0] - 1][: start[1]], self.lines[end[0] - 1][end[1] :]
        is_argument = re.search(rb"[\w\])]\($", before) is not None
        return before.endswith(b"(") and after.startswith(b")") and not is_argument

    # --- editing

    def edit(self, start: tuple[int, int], end: tuple[int, int], text: str, reason: str) -> None:
        """Put `text` between two positions."""
        self.edits.append(Edit(start, end, text, reason))

    def replace(self, node: ast.AST, text: str, reason: str) -> None:
        """Put `text` in place of an expression."""
        self.edits.append(Edit(start_of(node), end_of(node), text, reason))

    def wrap(self, node: ast.AST, before: str, after: str, reason: str) -> None:
        """Put text before and after an expression."""
        self.edits.append(Edit(start_of(node), start_of(node), before, reason))
        self.edits.append(Edit(end_of(node), end_of(node), after, ""))

    def indent(self, statement: ast.stmt) -> str:
        """Return the white space before a statement."""
        line = self.lines[statement.lineno - 1].decode()
        return line[: len(line) - len(line.lstrip())]

    def insert_after(self, statement: ast.stmt, code: str, reason: str) -> None:
        """Put lines after a statement, with its indentation; on its line if others follow on that line."""
        line, block = end_of(statement)[0], self.block(statement)
        if self._is_in_one_line(statement) or any(
            start_of(other) >= end_of(statement) and other.lineno == line for other in block
        ):
            self.edit(end_of(statement), end_of(statement), f"; {_one_line(statement, code)}", reason)
        else:
            self._insert(line + 1, self.indent(statement), code, reason)

    def insert_before(self, statement: ast.stmt, code: str, reason: str) -> None:
        """Put lines before a statement and its decorators; on its line if another statement comes first there."""
        line, block = statement.lineno, self.block(statement)
        if self._is_in_one_line(statement) or any(
            end_of(other)[0] == line and other is not statement and start_of(other) < start_of(statement)
            for other in block
        ):
            self.edit(start_of(statement), start_of(statement), f"{_one_line(statement, code)}; ", reason)
            return
        decorators = getattr(statement, "decorator_list", [])
        line = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
        self._insert(line, self.indent(statement), code, reason)

    def insert_first(self, owner: ast.If, code: str, reason: str) -> None:
        """Put lines first under an `if`, before the comments of its first statement."""
        first, head = owner.body[0], end_of(owner.test)[0]
        if first.lineno > head:
            self._insert(head + 1, self.indent(first), code, reason)
        else:
            self.insert_before(first, code, reason)

    def shares_line(self, statement: ast.stmt) -> bool:
        """Whether a line of the statement also has another statement, or the head of the block around it."""
        first_line, last_line = statement.lineno, end_of(statement)[0]
        others = [other for other in self.block(statement) if other is not statement]
        return self._is_in_one_line(statement) or any(
            other.lineno <= last_line and end_of(other)[0] >= first_line for other in others
        )

    def _is_in_one_line(self, statement: ast.stmt) -> bool:
        """Whether the statement is on the line of the `if` or loop around it."""
        return getattr(self.parents.get(statement), "lineno", 0) == statement.lineno

    def _insert(self, line: int, indent: str, code: str, reason: str) -> None:
        lines = [f"{indent}{each}" if each else "" for each in code.split("\n")]
        self.edits.append(Edit((line, 0), (line, 0), "".join(each + "\n" for each in lines), reason))

    def put_under(self, statement: ast.stmt, condition: str, reason: str) -> None:
        """Put a statement under an `if`. The lines of a string over several lines are not moved."""
        first_line, last_line = statement.lineno, end_of(statement)[0]
        if self.shares_line(statement):
            raise NotPortedError(first_line, "several statements share this line: put each on its own line")
        in_strings = {
            line
            for node in ast.walk(statement)
            if isinstance(node, ast.Constant | ast.JoinedStr) and node.lineno != node.end_lineno
            if self.code(node).lstrip("rbfuRBFU")[:3] in ('"""', "'''")
            for line in range(node.lineno + 1, end_of(node)[0] + 1)
        }
        self.insert_before(statement, f"if {condition}:", reason)
        for line in range(first_line, last_line + 1):
            if line not in in_strings and self.lines[line - 1].strip():
                self.edits.append(Edit((line, 0), (line, 0), self.unit, ""))

    def edited(self) -> str:
        """Return the text with all edits. Raises `NotPortedError` if edits overlap or the result is not Python."""
        starts = [0]
        for line in self.lines:
            starts.append(starts[-1] + len(line))
        raw = self.text.encode()

        def offset(position: tuple[int, int]) -> int:
            return min(starts[min(position[0] - 1, len(starts) - 1)] + position[1], len(raw))

        ordered_edits = sorted(enumerate(dict.fromkeys(self.edits)), key=lambda each: (offset(each[1].start), each[0]))
        chunks: list[bytes] = []
        end_of_last = 0
        for _, edit in ordered_edits:
            start, end = offset(edit.start), offset(edit.end)
            if start < end_of_last:
                raise NotPortedError(edit.start[0], "two edits of this line overlap: split it into several statements")
            text = edit.text.replace("\n", self.newline)
            chunks += [raw[end_of_last:start], text.encode()]
            end_of_last = end
        text = b"".join([*chunks, raw[end_of_last:]]).decode()
        try:
            ast.parse(text)
        except SyntaxError as error:
            raise NotPortedError(error.lineno or 1, f"the edited script is not valid Python ({error.msg})") from error
        return text


def parameter_names(scope: Scope) -> list[str]:
    """Return the names of all parameters of a function; those that can only be passed by name are last."""
    if isinstance(scope, ast.Module):
        return []
    arguments = scope.args
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def holds_line(statement: ast.stmt, line: int) -> bool:
    """Whether a line belongs to a statement, or to a block inside of it."""
    return statement.lineno <= line <= (statement.end_lineno or statement.lineno)


def _one_line(statement: ast.stmt, code: str) -> str:
    """Return code for the line of another statement. Raises `NotPortedError` if the code has several lines."""
    if "\n" in code or code.endswith(":"):
        raise NotPortedError(statement.lineno, "several statements share this line: put each on its own line")
    return code


def start_of(node: ast.AST) -> tuple[int, int]:
    """Return the line and column of the node's first character."""
    return node.lineno, node.col_offset  # type: ignore[attr-defined]


def end_of(node: ast.AST) -> tuple[int, int]:
    """Return the line and column after the node's last character."""
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
