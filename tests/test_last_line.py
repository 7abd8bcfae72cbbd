"""The last line on the screen: one line, whatever has happened, and nothing in it that steers a terminal."""

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

STEERS = "\x1b]0;pwned\x07\x1b[2J\x9b31m\u202e"


def record(**fields: object) -> Record:
    return Record("mine", "ddp", "spawn", "gloo", "cpu", 2, **fields)


# --- what nobody has foreseen


def test_what_nobody_has_foreseen_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Status 1 would say that a check has failed; the frames are in a file."""

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
def test_a_closed_output_is_no_failure(repository: Path, tmp_path: Path, closed: str) -> None:
    """`>&-` of a shell: what is then opened would otherwise be taken for the output, and written over."""
    command = f"'{sys.executable}' -m everyrank report records.json --markdown table.md {closed}"
    write_records([record()], tmp_path / "records.json")
    before = (tmp_path / "records.json").read_text()
    ended = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "records.json").read_text() == before
    assert "everyrank" not in (tmp_path / "table.md").read_text()


def test_a_rank_without_an_output() -> None:
    """A workload may take it away."""

    def takes_it_away(info: RankInfo) -> int:
        sys.stdout = sys.stderr = None  # type: ignore[assignment]
        return info.size

    assert run_ranks(Launch(processes=1), takes_it_away) == {0: 1}


# --- what is too large


@pytest.mark.parametrize("text", ["+".join(["1"] * 5000), "-" * 90_000 + "1"], ids=["sum", "signs"])
def test_a_setting_that_python_cannot_read(text: str) -> None:
    """Not as deep as that."""
    with pytest.raises(UsageError, match=f"--set lr: {len(text):,} characters, "):
        parse_settings([f"lr={text}"])


@pytest.mark.parametrize(
    ("name", "number"), [("peak_memory_bytes", 10**400), ("peak_memory_bytes", -(2**63)), ("epoch_seconds", 10**400)]
)
def test_a_number_that_is_none_of_ours(tmp_path: Path, name: str, number: int) -> None:
    """JSON has whole numbers of any length, and no table can be made of them."""
    write_records([record()], tmp_path / "r.json")
    [row] = json.loads((tmp_path / "r.json").read_text())
    (tmp_path / "r.json").write_text(json.dumps([{**row, name: number}]))
    with pytest.raises(UsageError, match="not a Record: "):
        read_records(tmp_path / "r.json")


def test_the_text_of_an_exception_is_shortened() -> None:
    """The beginning and the end; the whole is in the log."""
    long = "a" * 2_000_000 + "the end"
    for error in (RuntimeError(long), SyntaxError(long)):
        line = describe(error)
        assert len(line) < 1100
        assert "(2,000,007 characters)" in line
        assert line.endswith("the end")
    worker = RuntimeError(f'Original Traceback:\n  File "/x/my.py", line 3, in read\nValueError: {long}')
    assert len(describe(worker)) < 1100


def test_an_error_of_our_own_is_shortened_at_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> int:
        raise WorkloadError("a" * 2_000_000 + ": give another")

    monkeypatch.setattr(new, "run", fails)
    assert main(["new", "--list"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert len(line) < 1100
    assert line.endswith("give another")


# --- what would steer the terminal


def steers(text: str) -> bool:
    return any(letter in text for letter in "\x1b\x07\x9b\u202e")


def test_no_output_steers_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of metrics, reasons and paths come from files of other people."""
    shown = record(parity=Parity("not_verified", reason=STEERS), metrics={f"top{STEERS}1": 1.0})
    print_table(f"title{STEERS}", bench_table([shown]), [f"note{STEERS}"])
    Display(show=True).line(f"epoch 0, top{STEERS}1 0.5")
    assert main(["report", f"no{STEERS}.json"]) == 2
    said = capsys.readouterr()
    assert all(word in said.out for word in ("top", "title", "note", "epoch 0"))
    assert "no" in said.err
    assert not steers(said.out + said.err), ascii(said)


def test_no_bar_steers_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A bar itself does: it is drawn again and again."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with progress(1, show=True) as begin:
        begin(f"checking {STEERS}")
    said = capsys.readouterr().out
    assert "checking" in said
    assert "pwned\x07" not in said
    assert "\x9b31m" not in said


# --- a place of one's own


def test_a_file_where_a_folder_has_to_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Anybody may make one in /tmp."""
    import os

    environment = {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")}
    environment |= {f"OMPI_COMM_WORLD_{name}": "1" for name in ("SIZE", "LOCAL_SIZE")}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"everyrank-{os.getuid()}").touch()
    with pytest.raises(UsageError, match="set TMPDIR"):
        rank_info_from_environment(environment)
