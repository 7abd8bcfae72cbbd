"""Edits of a script's text change the bytes that they name, and no other."""

from __future__ import annotations

import ast

import pytest

from everyrank.port.source import NotPortedError, ScriptSource

TABBED = "import torch\n\n\ndef main():\n\tfor x in [1]:\n\t\tsave(x,  'ä',\n\t\t     2)  # why\n"


def call_of(source: ScriptSource, name: str) -> ast.Call:
    return next(n for n in ast.walk(source.tree) if isinstance(n, ast.Call) and source.code(n.func) == name)


def test_without_edits_the_text_is_unchanged() -> None:
    for text in (TABBED, TABBED.replace("\n", "\r\n")):
        assert ScriptSource(text).edited() == text


def test_a_statement_under_a_condition_keeps_tabs_and_comments() -> None:
    source = ScriptSource(TABBED)
    source.put_under(source.statement(call_of(source, "save")), "rank == 0", "written once")
    assert source.edited() == TABBED.replace(
        "\t\tsave(x,  'ä',\n\t\t     2)  # why\n", "\t\tif rank == 0:\n\t\t\tsave(x,  'ä',\n\t\t\t     2)  # why\n"
    )


def test_columns_are_bytes() -> None:
    source = ScriptSource("é = call('ü', b)\n")
    source.wrap(call_of(source, "call").args[1], "f(", ")", "")
    assert source.edited() == "é = call('ü', f(b))\n"


def test_windows_line_ends_are_kept() -> None:
    source = ScriptSource("a = 1\r\nb = 2\r\n")
    source.insert_after(source.tree.body[0], "c = 3", "")
    assert source.edited() == "a = 1\r\nc = 3\r\nb = 2\r\n"


def test_lines_of_a_long_string_are_not_moved() -> None:
    source = ScriptSource("if x:\n    write('''a\n  b\n''')\n")
    source.put_under(source.statement(call_of(source, "write")), "first", "")
    assert source.edited() == "if x:\n    if first:\n        write('''a\n  b\n''')\n"


def test_a_line_with_two_statements_is_refused() -> None:
    source = ScriptSource("a = 1; save(a)\n")
    with pytest.raises(NotPortedError, match="line 1"):
        source.put_under(source.statement(call_of(source, "save")), "first", "")


def test_overlapping_edits_are_refused() -> None:
    source = ScriptSource("f(g(x))\n")
    outer = call_of(source, "f")
    source.replace(outer, "1", "")
    source.replace(outer.args[0], "2", "")
    with pytest.raises(NotPortedError, match="overlap"):
        source.edited()


def test_a_file_without_a_last_line_end() -> None:
    source = ScriptSource("a = 1")
    source.insert_after(source.tree.body[0], "b = 2", "")
    assert source.edited() == "a = 1\nb = 2\n"


def test_lines_first_under_a_condition_stand_before_comments() -> None:
    source = ScriptSource("if a:  # always\n    # the loop\n    run()\nif b: run()\n")
    first, second = source.tree.body
    assert isinstance(first, ast.If)
    assert isinstance(second, ast.If)
    source.insert_first(first, "setup()", "")
    source.insert_first(second, "setup()", "")
    assert source.edited() == "if a:  # always\n    setup()\n    # the loop\n    run()\nif b: setup(); run()\n"


def test_decorated_functions_get_lines_before_their_decorators() -> None:
    source = ScriptSource("import a\n\n\n@a.b\ndef f():\n    pass\n")
    source.insert_before(source.tree.body[1], "x = 1", "")
    assert source.edited() == "import a\n\n\nx = 1\n@a.b\ndef f():\n    pass\n"


@pytest.mark.parametrize(
    ("text", "name", "after"),
    [
        ("a(); b(); c()\n", "a", "new()\na(); new(); b(); c()\n"),
        ("a(); b(); c()\n", "b", "a(); new(); b(); new(); c()\n"),
        ("a(); b(); c()\n", "c", "a(); b(); new(); c()\nnew()\n"),
        ("if x: a()\nb()\n", "a", "if x: new(); a(); new()\nb()\n"),
        ("for x in y:\n    a(); b()\n", "a", "for x in y:\n    new()\n    a(); new(); b()\n"),
    ],
)
def test_lines_beside_a_statement_that_shares_its_line(text: str, name: str, after: str) -> None:
    source = ScriptSource(text)
    call = next(n for n in ast.walk(source.tree) if isinstance(n, ast.Call) and source.code(n) == f"{name}()")
    statement = source.statement(call)
    source.insert_before(statement, "new()", "a reason")
    source.insert_after(statement, "new()", "a reason")
    assert source.edited() == after


def test_several_lines_beside_a_statement_that_shares_its_line_are_refused() -> None:
    source = ScriptSource("a(); b()\n")
    with pytest.raises(NotPortedError, match="share this line"):
        source.insert_after(source.tree.body[0], "if x:\n    new()", "a reason")
