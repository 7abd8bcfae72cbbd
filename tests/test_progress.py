"""The lines that rank 0 prints during a command."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

import pytest

from everyrank.progress import print_lines_once, print_row, progress


def test_repeated_lines_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    """For example, a model that prints its size when it is built does so many times in one `verify`."""
    with print_lines_once():
        for number in range(3):
            print("number of parameters: 10.65M")
            print("made", "of", end=" ")
            print("parts\nother:", number)
            print_row(f"row {number}: equal")
        print("begun", end="")
    lines = capsys.readouterr().out.split("\n")
    assert lines.count("number of parameters: 10.65M") == lines.count("made of parts") == 1
    assert [line for line in lines if line.startswith(("other", "row"))] == [
        *("other: 0", "row 0: equal", "other: 1", "row 1: equal", "other: 2", "row 2: equal"),
    ]
    assert lines[-1] == "begun"
    with print_lines_once(active=False):
        print("twice\ntwice")
    print("twice")
    assert capsys.readouterr().out == "twice\ntwice\ntwice\n"


def test_stdout_is_restored_after_an_error() -> None:
    """`print_lines_once` also prints an incomplete last line."""
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        with pytest.raises(ZeroDivisionError), print_lines_once():
            print("before", 1 / (print("begun", end="") or 0))
        assert sys.stdout is stdout
    assert stdout.getvalue() == "begun"


def test_rows_are_printed_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Each row is printed as soon as it is known, as one line without control characters."""
    with progress(2, show=True) as advance:
        advance("check ddp")
        print_row("ddp: equal")
        print_row("not verified: two\nlines \x1b[31m")
    assert capsys.readouterr().out == "ddp: equal\nnot verified: two lines  [31m\n"


def test_closed_pipe_does_not_stop_the_command() -> None:
    """`head -n 1` closes the pipe while the command prints more rows."""
    code = (
        "import time; from everyrank.progress import print_row\n"
        "print_row('first'); time.sleep(1)\n"
        "for _ in range(9): print_row('x' * 9999)\n"
        "import sys; sys.stderr.write('done'); sys.exit(7)"
    )
    command = f'{sys.executable} -c "{code}" 2>&3 | head -n 1; exit ${{PIPESTATUS[0]}}'
    process = subprocess.run(
        ["bash", "-c", f"({command}) 3>&1"], capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 7, process
    assert process.stdout.split() == ["first", "done"]
