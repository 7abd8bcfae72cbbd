"""Edits of a script's source change only the code that they name."""

from __future__ import annotations

import ast
import codecs
from pathlib import Path

import pytest

from everyrank.errors import UsageError
from everyrank.port.run import read_script
from everyrank.port.source import NotPortedError, ScriptSource

TABBED = "import torch\n\n\ndef main():\n\tfor x in [1]:\n\t\tsave(x,  'ä',\n\t\t     2)  # why\n"


def call_of(source: ScriptSource, name: str) -> ast.Call:
    """Return the first call of the function with this name."""
    return next(node for node in ast.walk(source.tree) if isinstance(node, ast.Call) and source.code(node.func) == name)


def test_text_without_edits_is_unchanged() -> None:
    """The lines end with a line feed, or with the two characters of Windows."""
    for script in (TABBED, TABBED.replace("\n", "\r\n")):
        assert ScriptSource(script).edited() == script


def test_script_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """Some editors of Windows write one."""
    (tmp_path / "train.py").write_bytes(codecs.BOM_UTF8 + TABBED.encode())
    assert ScriptSource(read_script(tmp_path / "train.py")).text == TABBED


def test_script_that_is_not_valid_python_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nfor x in\n")
    with pytest.raises(UsageError, match=r"train\.py: line 2 is not valid Python \(invalid syntax\)"):
        read_script(tmp_path / "train.py")


def test_statement_under_a_condition_keeps_tabs_and_comments() -> None:
    """All lines of the statement get one more tab."""
    source = ScriptSource(TABBED)
    source.put_under(source.statement(call_of(source, "save")), "rank == 0", "written once")
    assert source.edited() == TABBED.replace(
        "\t\tsave(x,  'ä',\n\t\t     2)  # why\n", "\t\tif rank == 0:\n\t\t\tsave(x,  'ä',\n\t\t\t     2)  # why\n"
    )


def test_columns_of_non_ascii_code_are_bytes() -> None:
    """ast counts columns in bytes, and `é` has two."""
    source = ScriptSource("é = call('ü', b)\n")
    source.wrap(call_of(source, "call").args[1], "f(", ")", "")
    assert source.edited() == "é = call('ü', f(b))\n"


def test_windows_line_ends_are_kept() -> None:
    """An inserted line ends like the lines around it."""
    source = ScriptSource("a = 1\r\nb = 2\r\n")
    source.insert_after(source.tree.body[0], "c = 3", "")
    assert source.edited() == "a = 1\r\nc = 3\r\nb = 2\r\n"


def test_lines_of_a_multiline_string_are_not_indented() -> None:
    """Indenting them would change the string."""
    source = ScriptSource("if x:\n    write('''a\n  b\n''')\n")
    source.put_under(source.statement(call_of(source, "write")), "first", "")
    assert source.edited() == "if x:\n    if first:\n        write('''a\n  b\n''')\n"


def test_condition_on_a_line_with_two_statements_is_refused() -> None:
    """A condition cannot be put in front of the second statement only."""
    source = ScriptSource("a = 1; save(a)\n")
    with pytest.raises(NotPortedError, match="line 1"):
        source.put_under(source.statement(call_of(source, "save")), "first", "")


def test_overlapping_edits_are_refused() -> None:
    """One edit replaces a call, and the other replaces its argument."""
    source = ScriptSource("f(g(x))\n")
    outer = call_of(source, "f")
    source.replace(outer, "1", "")
    source.replace(outer.args[0], "2", "")
    with pytest.raises(NotPortedError, match="overlap"):
        source.edited()


def test_line_is_inserted_after_a_last_line_without_line_end() -> None:
    """The line end is added before the inserted line."""
    source = ScriptSource("a = 1")
    source.insert_after(source.tree.body[0], "b = 2", "")
    assert source.edited() == "a = 1\nb = 2\n"


def test_lines_at_the_start_of_a_block_are_inserted_before_comments() -> None:
    """The if statement has a block with a comment, or a body on the same line."""
    source = ScriptSource("if a:  # always\n    # the loop\n    run()\nif b: run()\n")
    block_if, one_line_if = source.tree.body
    assert isinstance(block_if, ast.If)
    assert isinstance(one_line_if, ast.If)
    source.insert_first(block_if, "setup()", "")
    source.insert_first(one_line_if, "setup()", "")
    assert source.edited() == "if a:  # always\n    setup()\n    # the loop\n    run()\nif b: setup(); run()\n"


def test_lines_before_a_decorated_function_are_inserted_before_the_decorator() -> None:
    """A line between decorator and function would be a syntax error."""
    source = ScriptSource("import a\n\n\n@a.b\ndef f():\n    pass\n")
    source.insert_before(source.tree.body[1], "x = 1", "")
    assert source.edited() == "import a\n\n\nx = 1\n@a.b\ndef f():\n    pass\n"


@pytest.mark.parametrize(
    ("script", "name", "expected"),
    [
        ("a(); b(); c()\n", "a", "new()\na(); new(); b(); c()\n"),
        ("a(); b(); c()\n", "b", "a(); new(); b(); new(); c()\n"),
        ("a(); b(); c()\n", "c", "a(); b(); new(); c()\nnew()\n"),
        ("if x: a()\nb()\n", "a", "if x: new(); a(); new()\nb()\n"),
        ("for x in y:\n    a(); b()\n", "a", "for x in y:\n    new()\n    a(); new(); b()\n"),
    ],
)
def test_lines_are_inserted_next_to_a_statement_that_shares_its_line(script: str, name: str, expected: str) -> None:
    """A line is inserted before and after each of several statements on one line."""
    source = ScriptSource(script)
    call = next(
        node for node in ast.walk(source.tree) if isinstance(node, ast.Call) and source.code(node) == f"{name}()"
    )
    statement = source.statement(call)
    source.insert_before(statement, "new()", "a reason")
    source.insert_after(statement, "new()", "a reason")
    assert source.edited() == expected


def test_several_lines_next_to_a_statement_that_shares_its_line_are_refused() -> None:
    """An if statement cannot be joined to the others by a semicolon."""
    source = ScriptSource("a(); b()\n")
    with pytest.raises(NotPortedError, match="share this line"):
        source.insert_after(source.tree.body[0], "if x:\n    new()", "a reason")
