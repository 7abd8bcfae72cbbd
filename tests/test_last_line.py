"""The last line of output: one line for any error, shortened, and without terminal control characters."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from everyrank.cli import main
from everyrank.commands import new
from everyrank.errors import UsageError, WorkloadError, describe
from everyrank.launch import Launch, RankInfo, rank_info_from_environment, run_ranks
from everyrank.progress import progress
from everyrank.record import Parity, Record, read_records, write_records
from everyrank.report import print_table
from everyrank.report.table import bench_table
from everyrank.train.display import Display
from everyrank.workload import parse_settings

CONTROL_CHARACTERS = "\x1b]0;pwned\x07\x1b[2J\x9b31m\u202e"


def record(**fields: object) -> Record:
    return Record("mine", "ddp", "spawn", "gloo", "cpu", 2, **fields)


# --- unexpected errors and closed outputs


def test_unexpected_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The exit status is 4, because 1 means a failed check. The traceback is in a file."""

    def fails(_: object) -> int:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(new, "run", fails)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["new", "--list"]) == 4
    log, line = capsys.readouterr().err.splitlines()
    assert line.startswith("everyrank: test_last_line.py:")
    assert line.endswith(" in fails: ZeroDivisionError: division by zero")
    assert "Traceback" in Path(log.removeprefix("full traceback: ")).read_text()


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_output_is_not_an_error(repository: Path, tmp_path: Path, closed: str) -> None:
    """`>&-` in a shell closes stdout. A file opened next could get its descriptor and be overwritten."""
    command = f"'{sys.executable}' -m everyrank report records.json --markdown table.md {closed}"
    write_records([record()], tmp_path / "records.json")
    original_text = (tmp_path / "records.json").read_text()
    result = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "records.json").read_text() == original_text
    assert "everyrank" not in (tmp_path / "table.md").read_text()


def test_rank_without_stdout_and_stderr() -> None:
    """A workload may set them to None. The rank still returns its result."""

    def remove_streams(info: RankInfo) -> int:
        sys.stdout = sys.stderr = None  # type: ignore[assignment]
        return info.size

    assert run_ranks(Launch(processes=1), remove_streams) == {0: 1}


# --- values and messages that are too large


@pytest.mark.parametrize("text", ["+".join(["1"] * 5000), "-" * 90_000 + "1"], ids=["sum", "signs"])
def test_too_deeply_nested_setting_is_refused(text: str) -> None:
    """Python's parser fails for an expression that is nested too deeply."""
    with pytest.raises(UsageError, match=f"--set lr: {len(text):,} characters, "):
        parse_settings([f"lr={text}"])


@pytest.mark.parametrize(
    ("name", "number"), [("peak_memory_bytes", 10**400), ("peak_memory_bytes", -(2**63)), ("epoch_seconds", 10**400)]
)
def test_number_out_of_range_in_a_record_is_refused(tmp_path: Path, name: str, number: int) -> None:
    """JSON allows integers of any length, which a table cannot show."""
    write_records([record()], tmp_path / "r.json")
    [row] = json.loads((tmp_path / "r.json").read_text())
    (tmp_path / "r.json").write_text(json.dumps([{**row, name: number}]))
    with pytest.raises(UsageError, match="not a Record: "):
        read_records(tmp_path / "r.json")


def test_message_of_an_exception_is_shortened() -> None:
    """The line has the start and the end of the message. The log has all of it."""
    long_text = "a" * 2_000_000 + "the end"
    for error in (RuntimeError(long_text), SyntaxError(long_text)):
        line = describe(error)
        assert len(line) < 1100
        assert "(2,000,007 characters)" in line
        assert line.endswith("the end")
    worker_error = RuntimeError(f'Original Traceback:\n  File "/x/my.py", line 3, in read\nValueError: {long_text}')
    assert len(describe(worker_error)) < 1100


WORKER_TRACEBACK = """Caught an error in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/home/me/my data.py", line 3, in read
    raise error
    ^^^^^^^^^^^
"""


@pytest.mark.parametrize(
    ("last_lines", "expected"),
    [
        ("ValueError: the first line\nnext: another\ndone\n", "ValueError: the first line"),
        ("__main__.main.<locals>.MyError: why\n", "__main__.main.<locals>.MyError: why"),
        ("KeyError\n", "KeyError"),
    ],
)
def test_error_of_a_loader_worker_is_the_first_line_of_its_message(last_lines: str, expected: str) -> None:
    """torch sends the traceback as text. The lines of a message may look like the name of an exception."""
    assert describe(RuntimeError(WORKER_TRACEBACK + last_lines)) == f"my data.py:3 in read: {expected}"


def test_text_that_is_no_traceback_is_described_as_any_message() -> None:
    for text in ("Original Traceback", "Original Traceback: lost"):
        assert describe(RuntimeError(text)) == f"RuntimeError: {text}"


def test_exception_whose_text_raises_an_error_is_named() -> None:
    """Its class sets an attribute that `__str__` reads only later, for example."""

    class Unfinished(Exception):
        def __str__(self) -> str:
            raise AttributeError("detail")

    assert describe(Unfinished()) == "Unfinished"


def test_message_of_a_workload_error_is_shortened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> int:
        raise WorkloadError("a" * 2_000_000 + ": give another")

    monkeypatch.setattr(new, "run", fails)
    assert main(["new", "--list"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert len(line) < 1100
    assert line.endswith("give another")


# --- terminal control characters


def has_control_characters(text: str) -> bool:
    return any(character in text for character in "\x1b\x07\x9b\u202e")


def test_output_has_no_terminal_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of metrics, reasons and paths may come from untrusted files."""
    hostile_record = record(
        parity=Parity("not_verified", reason=CONTROL_CHARACTERS), metrics={f"top{CONTROL_CHARACTERS}1": 1.0}
    )
    print_table(f"title{CONTROL_CHARACTERS}", bench_table([hostile_record]), [f"note{CONTROL_CHARACTERS}"])
    Display(show=True).line(f"epoch 0, top{CONTROL_CHARACTERS}1 0.5")
    assert main(["report", f"no{CONTROL_CHARACTERS}.json"]) == 2
    captured = capsys.readouterr()
    assert all(word in captured.out for word in ("top", "title", "note", "epoch 0"))
    assert ".json" in captured.err
    assert not has_control_characters(captured.out + captured.err), ascii(captured)


def test_progress_bar_label_has_no_terminal_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bar itself uses control sequences, because it is redrawn. So only those of the label are checked."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with progress(1, show=True) as advance:
        advance(f"checking {CONTROL_CHARACTERS}")
    output = capsys.readouterr().out
    assert "checking" in output
    assert "pwned\x07" not in output
    assert "\x9b31m" not in output


# --- the folder of everyrank in the temporary directory


def test_file_in_place_of_the_temporary_folder_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Any user can create a file with this name in /tmp."""
    import os

    environment = {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")}
    environment |= {f"OMPI_COMM_WORLD_{name}": "1" for name in ("SIZE", "LOCAL_SIZE")}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"everyrank-{os.getuid()}").touch()
    with pytest.raises(UsageError, match="set TMPDIR"):
        rank_info_from_environment(environment)
