"""Output of rank 0 under a launcher that adds a prefix to each line."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from everyrank.launch.horovodrun import LAUNCHER
from everyrank.launch.monitor import pass_on_output


@pytest.mark.parametrize("size", [1, 3, 100_000])
def test_prefix_is_removed_from_output_of_rank_0(capfd: pytest.CaptureFixture[str], size: int) -> None:
    """Lines, a progress bar with carriage returns, and an end without a newline. Other output goes to the log.

    The text arrives in pieces of `size` bytes.
    """
    text = "[0]<stdout>:first ü\n[0]<stdout>:10%\r[0]<stdout>:20%\rProcess 1 exit with status code 1.\n"
    text += "[1]<stdout>:of another\n[0]<stdout>:\n[0]<stdout>:[0]<stdout>: a mark of its own\n[0]<stdout>:end"
    read_end, write_end = os.pipe()
    log = io.BytesIO()
    assert LAUNCHER.line_prefix is not None
    thread = pass_on_output(os.fdopen(read_end, "rb"), LAUNCHER.line_prefix, log)
    data = text.encode()
    for offset in range(0, len(data), size):
        os.write(write_end, data[offset : offset + size])
    os.close(write_end)
    thread.join(30.0)
    assert capfd.readouterr().out.encode() == "first ü\n10%\r20%\r\n[0]<stdout>: a mark of its own\nend".encode()
    assert log.getvalue() == b"Process 1 exit with status code 1.\n[1]<stdout>:of another\n"


def test_output_after_the_log_is_closed_is_dropped(tmp_path: Path) -> None:
    """The run has ended while a process of the launcher still prints."""
    read_end, write_end = os.pipe()
    log = (tmp_path / "log").open("wb")
    log.close()
    thread = pass_on_output(os.fdopen(read_end, "rb"), b"mark", log)
    os.write(write_end, b"too late\n")
    os.close(write_end)
    thread.join(30.0)
    assert not thread.is_alive()
    assert (tmp_path / "log").read_bytes() == b""


def test_last_output_of_the_launcher_is_in_the_log_before_it_is_closed(tmp_path: Path) -> None:
    """The error of a launcher that ends before its ranks have started shows its last line."""
    read_end, write_end = os.pipe()
    with (tmp_path / "log").open("wb") as log:
        thread = pass_on_output(os.fdopen(read_end, "rb"), b"mark", log)
        os.write(write_end, b"no ssh\n")
        os.close(write_end)
        thread.join(30.0)
        assert (tmp_path / "log").read_bytes() == b"no ssh\n"
