"""What rank 0 says while work goes on."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

import pytest

from everyrank.progress import print_lines_once, print_row, progress


def test_what_is_printed_again_and_again_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A model that prints its size when it is built was heard twenty times in one verify."""
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


def test_the_stream_is_given_back_after_an_error() -> None:
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        with pytest.raises(ZeroDivisionError), print_lines_once():
            print("before", 1 / (print("begun", end="") or 0))
        assert sys.stdout is screen
    assert screen.getvalue() == "begun"


def test_a_row_is_said_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was printed until the end where nobody looks at a terminal; a row is a line, whatever it is called."""
    with progress(2, show=True) as begin:
        begin("check ddp")
        print_row("ddp: equal")
        print_row("not verified: two\nlines \x1b[31m")
    assert capsys.readouterr().out == "ddp: equal\nnot verified: two lines  [31m\n"


def test_a_reader_that_has_gone_stops_nothing() -> None:
    code = (
        "import time; from everyrank.progress import print_row\n"
        "print_row('first'); time.sleep(1)\n"
        "for _ in range(9): print_row('x' * 9999)\n"
        "import sys; sys.stderr.write('done'); sys.exit(7)"
    )
    command = f'{sys.executable} -c "{code}" 2>&3 | head -n 1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", f"({command}) 3>&1"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 7, done
    assert done.stdout.split() == ["first", "done"]
