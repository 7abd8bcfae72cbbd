"""everyrank port: invalid options, the header of a script that is not equivalent, the HTML page, and the helpers."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from everyrank.cli import main
from everyrank.commands.port import with_header
from everyrank.port import Attempt, PortResult, ScriptFiles
from everyrank.port.check import PortComparison
from everyrank.port.helpers import helper_text
from everyrank.port.source import Edit
from everyrank.report.port import port_page
from processes import closed_pipe, refusal_message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch\n", "# why\nimport torch\n"),
        ("#!/usr/bin/env python\nimport torch\n", "#!/usr/bin/env python\n# why\nimport torch\n"),
        ("#!/bin/python\n# -*- coding: utf-8 -*-\nx = 1\n", "#!/bin/python\n# -*- coding: utf-8 -*-\n# why\nx = 1\n"),
        ("# a comment\nx = 1\n", "# why\n# a comment\nx = 1\n"),
    ],
)
def test_header_follows_shebang_and_encoding_lines(text: str, expected: str) -> None:
    """Python reads both lines only at the top of the file."""
    assert with_header(text, "# why\n") == expected


@pytest.mark.parametrize(
    ("options", "expected_text"),
    [
        (["--check", "other.py"], "other.py"),
        (["--check", "train.py", "--force"], "--force"),
        (["--check-processes", "1"], "--check-processes"),
        (["--check-processes", "²"], "--check-processes"),
        (["--limit", "0"], "--limit 0: give more than 0"),
        (["--limit", "nan"], "--limit nan"),
        (["--limit", "inf"], "--limit inf"),
        (["--json", "./train.py"], "train.py: this is the script"),
        (["--html", "train.py"], "train.py: this is the script"),
        (["-o", "train.py"], "--in-place"),
        (["--to", "workload", "-o", "elsewhere/train_workload.py"], "-o elsewhere/train_workload.py"),
        (["--to", "workload", "--in-place"], "--in-place"),
        (["--to", "workload", "--sampler", "torch"], "--sampler"),
    ],
)
def test_invalid_options_are_named_in_the_error(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    expected_text: str,
) -> None:
    """The error is one line and the exit code is 2."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\n")
    assert expected_text in refusal_message(capsys, "port", *options, "train.py")


def test_closed_pipe_loses_no_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`everyrank port train.py | head` writes the port, too."""
    monkeypatch.chdir(tmp_path)
    script = Path("train.py")
    script.write_text("a\n")
    attempt = Attempt(None, "b\n", [], [], [PortComparison(2, 8, {"losses": 0.0}, "", [], [])])
    result = PortResult(ScriptFiles(script, "a\n"), attempt, [attempt], True)
    monkeypatch.setattr("everyrank.port.port_script", lambda *_: result)
    monkeypatch.setattr("everyrank.port.audit_port", lambda *_: [])
    with closed_pipe() as stream, contextlib.redirect_stdout(stream):
        assert main(["port", "train.py"]) == 0
    assert Path("train_ddp.py").read_text() == "b\n"


def test_page_escapes_html_and_shows_script_and_port() -> None:
    """The page also shows the reasons of edits, the notes and the printed lines that differ."""
    comparison = PortComparison(2, 8, {"losses": 0.0}, "", [("<b>1</b>", "2")], ["train_ddp.py:3 prints on each rank"])
    attempt = Attempt(
        None, "a = 1\nb = '<i>'\n", [Edit((2, 0), (2, 0), "b", "the reason")], [(1, "a note")], [comparison]
    )
    page = port_page(
        PortResult(ScriptFiles(Path("train.py"), "a = 1\nc = '<u>'\n"), attempt, [attempt], True),
        [],
        ["train.py"],
        "train_ddp.py",
    )
    for text in ("&lt;b&gt;1", "&lt;u&gt;", "&lt;i&gt;", "the reason", "a note", "prints on each rank"):
        assert text in page, text
    assert "<u>" not in page


def page_rows(files: ScriptFiles, attempt: Attempt) -> list[list[str]]:
    """Return the cells of each row of the page: number and line of the script, of the port, reasons."""
    page = port_page(PortResult(files, attempt, [attempt], True), [], ["train.py"], "train_ddp.py")
    rows = re.findall(r"<tr>(<td.*?)</tr>", page, re.DOTALL)
    return [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in rows]


def test_page_shows_the_reason_of_a_line_inserted_after_an_edited_line() -> None:
    edits = [Edit((1, 0), (1, 1), "A", "edited"), Edit((2, 0), (2, 0), "new\n", "inserted")]
    rows = page_rows(ScriptFiles(Path("train.py"), "a\nb\nc\n"), Attempt(None, "A\nnew\nb\nc\n", edits, [], []))
    assert rows[:3] == [["1", "a", "1", "A", "edited"], ["", "", "2", "new", "inserted"], ["2", "b", "3", "b", ""]]


def test_page_numbers_lines_as_python_does() -> None:
    """A form feed and a line separator in a string do not end a line."""
    edits = [Edit((3, 0), (3, 1), "B", "edited")]
    rows = page_rows(
        ScriptFiles(Path("train.py"), "a = '\u2028'\n\x0c\nb\n"),
        Attempt(None, "a = '\u2028'\n\x0c\nB\n", edits, [], []),
    )
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert rows[2] == ["3", "b", "3", "B", "edited"]


def test_page_numbers_the_lines_of_the_second_file_from_one() -> None:
    files = ScriptFiles(Path("train.py"), "a\nb\n", Path("engine.py"), "x\ny\n")
    line = files.num_lines + 2
    edits = [Edit((line, 0), (line, 1), "Y", "edited")]
    rows = page_rows(files, Attempt(None, "new\na\nb\n", edits, [], [], other_text="x\nY\n"))
    assert rows[-1] == ["2", "y", "2", "Y", "edited"]


def test_helpers_include_logging_and_distributed_sampler_only_if_requested() -> None:
    """The code of the helpers compiles in both cases."""
    names = {"setup", "split"}
    default_helpers = helper_text(names, has_batch_norm=False, finds_unused=False, sums=False, has_numpy=False)
    logging_helpers = helper_text(
        names, has_batch_norm=False, finds_unused=False, sums=False, has_numpy=False, has_logging=True, sampler="torch"
    )
    assert "logging.disable()" not in default_helpers
    assert "RankBatches" in default_helpers
    assert "logging.disable()" in logging_helpers
    assert "DistributedSampler" in logging_helpers
    assert "RankBatches" not in logging_helpers
    for text in (default_helpers, logging_helpers):
        compile(text, "helpers", "exec")
