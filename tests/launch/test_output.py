"""What rank 0 prints under a launcher that puts a mark before each line."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from everyrank.launch.horovodrun import LAUNCHER
from everyrank.launch.monitor import pass_on_output


@pytest.mark.parametrize("size", [1, 3, 100_000])
def test_marks_are_taken_off(capfd: pytest.CaptureFixture[str], size: int) -> None:
    """Lines, a bar that begins again by a carriage return, an end without a line; what others say goes to the log.

    In whatever pieces it comes.
    """
    text = "[0]<stdout>:first ü\n[0]<stdout>:10%\r[0]<stdout>:20%\rProcess 1 exit with status code 1.\n"
    text += "[1]<stdout>:of another\n[0]<stdout>:\n[0]<stdout>:[0]<stdout>: a mark of its own\n[0]<stdout>:end"
    ours, theirs = os.pipe()
    log = io.BytesIO()
    assert LAUNCHER.line_prefix is not None
    thread = pass_on_output(os.fdopen(ours, "rb"), LAUNCHER.line_prefix, log)
    data = text.encode()
    for begin in range(0, len(data), size):
        os.write(theirs, data[begin : begin + size])
    os.close(theirs)
    thread.join(30.0)
    assert capfd.readouterr().out.encode() == "first ü\n10%\r20%\r\n[0]<stdout>: a mark of its own\nend".encode()
    assert log.getvalue() == b"Process 1 exit with status code 1.\n[1]<stdout>:of another\n"


def test_a_log_that_is_closed_takes_no_more(tmp_path: Path) -> None:
    """The run has ended while a process of the launcher's still speaks."""
    ours, theirs = os.pipe()
    log = (tmp_path / "log").open("wb")
    log.close()
    thread = pass_on_output(os.fdopen(ours, "rb"), b"mark", log)
    os.write(theirs, b"too late\n")
    os.close(theirs)
    thread.join(30.0)
    assert not thread.is_alive()
    assert (tmp_path / "log").read_bytes() == b""
