"""Which variables of a call of `print` or of a logger gave a number of the line that it printed."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence

from everyrank.audit.data_flow import read_source

__all__ = ["shown_variables"]

_PERCENT = re.compile(r"%(?:%|[-+ #0]*\d*(?:\.\d+)?[a-zA-Z])")
_BRACES = re.compile(r"\{\{|\}\}|\{(\d*)[^{}]*\}")
_Piece = str | ast.expr


def shown_variables(place: str, text: str, position: int) -> tuple[str, ...]:
    """Return the variables in the expression that gave the characters of `text` at `position`.

    place  the line of the call, "/path/train.py:12"

    Returns () where the text does not fit to what the source says, for example for a table made elsewhere.

    Example:
        # print(f"epoch {epoch} loss {total / count:.3f}")
        shown_variables("train.py:12", "epoch 3 loss 0.412", 13)  # ("count", "total")

    """
    path, _, line = place.rpartition(":")
    source = read_source(path)
    statement = source.at(int(line)) if source is not None and line.isdigit() else None
    for call in statement.calls if statement is not None else ():
        pieces = _pieces(call)
        expressions = [piece for piece in pieces if not isinstance(piece, str)]
        pattern = "".join(re.escape(piece) if isinstance(piece, str) else "(.*?)" for piece in pieces)
        found = re.fullmatch(pattern, text) if expressions else None
        for expression, (begin, end) in zip(expressions, found.regs[1:] if found is not None else (), strict=False):
            if begin <= position < end:
                return tuple(sorted({node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}))
    return ()


def _pieces(call: ast.Call) -> list[_Piece]:
    """The constant texts and the expressions that a call prints, in their order."""
    template = _text(call.args[0]) if isinstance(call.func, ast.Attribute) and len(call.args) > 1 else None
    if template is not None:
        return list(_filled(template, _PERCENT, call.args[1:]))  # logger.info("loss %.3f", loss)
    pieces: list[_Piece] = []
    for number, argument in enumerate(call.args):
        pieces += [" "] * bool(number)
        pieces += _parts(argument)
    return pieces


def _parts(node: ast.expr) -> Iterator[_Piece]:
    """The pieces of one argument."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr():
            for each in node.values:
                yield from _parts(each.value if isinstance(each, ast.FormattedValue) else each)
        case ast.BinOp(op=ast.Mod(), left=ast.Constant(value=str(template))):
            values = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
            yield from _filled(template, _PERCENT, values)
        case ast.BinOp(op=ast.Add()):
            yield from itertools.chain(_parts(node.left), _parts(node.right))
        case ast.Call(func=ast.Attribute(attr="format", value=ast.Constant(value=str(template)))):
            yield from _filled(template, _BRACES, node.args)
        case _:
            yield node


def _filled(template: str, fields: re.Pattern[str], values: Sequence[ast.expr]) -> Iterator[_Piece]:
    """A template with its values; fewer pieces, which then fit to no text, where they do not go together."""
    end = taken = 0
    for field in fields.finditer(template):
        yield template[end : field.start()]
        end = field.end()
        if field[0] in ("%%", "{{", "}}"):
            yield field[0][0]
            continue
        number = field[1] if field.groups() else ""
        index = int(number) if number else taken
        if index >= len(values):
            return
        taken += 1
        yield values[index]
    yield template[end:]


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
