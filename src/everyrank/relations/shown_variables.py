"""Finds the variables in a call of `print` or of a logger that a printed number comes from."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence

from everyrank.audit.data_flow import read_source

__all__ = ["shown_variables"]

_PERCENT = re.compile(r"%(?:%|[-+ #0]*\d*(?:\.\d+)?[a-zA-Z])")
_BRACES = re.compile(r"\{\{|\}\}|\{(\d*)[^{}]*\}")
_Segment = str | ast.expr


def shown_variables(location: str, text: str, position: int) -> tuple[str, ...]:
    """Return the variables of the expression whose value is at `position` in `text`.

    location  the line of the call, "/path/train.py:12"

    Returns () if the text does not match the source of the line, for example for a table that other code formats.

    Example:
        # print(f"epoch {epoch} loss {total / count:.3f}")
        shown_variables("train.py:12", "epoch 3 loss 0.412", 13)  # ("count", "total")

    """
    path, _, line = location.rpartition(":")
    source = read_source(path)
    statement = source.at(int(line)) if source is not None and line.isdigit() else None
    for call in statement.calls if statement is not None else ():
        segments = _segments_of_call(call)
        expressions = [segment for segment in segments if not isinstance(segment, str)]
        pattern = "".join(re.escape(segment) if isinstance(segment, str) else "(.*?)" for segment in segments)
        match = re.fullmatch(pattern, text) if expressions else None
        for expression, (start, end) in zip(expressions, match.regs[1:] if match is not None else (), strict=False):
            if start <= position < end:
                return tuple(sorted({node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}))
    return ()


def _segments_of_call(call: ast.Call) -> list[_Segment]:
    """The constant texts and the expressions that a call prints, in order."""
    template = _constant_text(call.args[0]) if isinstance(call.func, ast.Attribute) and len(call.args) > 1 else None
    if template is not None:
        return list(_fill_template(template, _PERCENT, call.args[1:]))  # logger.info("loss %.3f", loss)
    segments: list[_Segment] = []
    for index, argument in enumerate(call.args):
        segments += [" "] * bool(index)
        segments += _segments_of_argument(argument)
    return segments


def _segments_of_argument(node: ast.expr) -> Iterator[_Segment]:
    """Yield the texts and expressions of one argument."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr():
            for each in node.values:
                yield from _segments_of_argument(each.value if isinstance(each, ast.FormattedValue) else each)
        case ast.BinOp(op=ast.Mod(), left=ast.Constant(value=str(template))):
            values = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
            yield from _fill_template(template, _PERCENT, values)
        case ast.BinOp(op=ast.Add()):
            yield from itertools.chain(_segments_of_argument(node.left), _segments_of_argument(node.right))
        case ast.Call(func=ast.Attribute(attr="format", value=ast.Constant(value=str(template)))):
            yield from _fill_template(template, _BRACES, node.args)
        case _:
            yield node


def _fill_template(template: str, fields: re.Pattern[str], values: Sequence[ast.expr]) -> Iterator[_Segment]:
    """Yield the texts and values of a template. If values are missing, it ends early, and then matches no text."""
    end = num_used = 0
    for field in fields.finditer(template):
        yield template[end : field.start()]
        end = field.end()
        if field[0] in ("%%", "{{", "}}"):
            yield field[0][0]
            continue
        explicit_index = field[1] if field.groups() else ""
        value_index = int(explicit_index) if explicit_index else num_used
        if value_index >= len(values):
            return
        num_used += 1
        yield values[value_index]
    yield template[end:]


def _constant_text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
