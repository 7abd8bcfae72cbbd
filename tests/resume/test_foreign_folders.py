"""Folders of runs that are not as we left them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everyrank.record import read_records
from everyrank.runs import checkpoints_of, damage
from processes import Cli
from resuming import logged, spoilt

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="looking for left processes needs Linux's /proc"
)


def one_epoch(cli: Cli, folder: Path, *words: str) -> Path:
    done = cli.on_ranks(folder, "train", spoilt(folder), "--epochs", "1", "--out", "run", "--device", "cpu", *words)
    assert done.status == 0, done
    return folder / "run"


def goes_on(cli: Cli, folder: Path, *words: str) -> str:
    done = cli.on_ranks(folder, "train", spoilt(folder), "--out", "run", "--device", "cpu", "--resume", *words)
    assert done.status == 0, done
    return done.out


def test_links_in_a_foreign_folder_are_not_written_through(cli: Cli, tmp_path: Path) -> None:
    """What they lead to is as it was, and the training goes on."""
    run = one_epoch(cli, tmp_path)
    (tmp_path / "outside").mkdir()
    mine = tmp_path / "mine"
    mine.write_text("mine")
    names = ["log.jsonl", "log.csv", "events.jsonl", "epochs.csv"]
    for name in [*(f"{name}.partial" for name in names), *names[1:2], "record.json", "checkpoints/best.tmp"]:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(mine)
    (run / "checkpoints" / "step-00000008.tmp").symlink_to(tmp_path / "outside")
    goes_on(cli, tmp_path)
    assert mine.read_text() == "mine"
    assert not list((tmp_path / "outside").iterdir())
    assert [(one.metadata.step, damage(one)) for one in checkpoints_of(run)] == [(4, None), (8, None)]
    assert len(read_records(run / "record.json")[0].loss) == 8


@pytest.mark.parametrize("place", ["", "run", "run/checkpoints/best", "run/checkpoints/step-00000004"])
def test_checkpoints_may_be_on_another_disk(cli: Cli, tmp_path: Path, place: str) -> None:
    """A link to a folder with more room."""
    run = one_epoch(cli, tmp_path)
    (run / "checkpoints").rename(tmp_path / "scratch")
    (run / "checkpoints").symlink_to(tmp_path / "scratch")
    assert "after update 4 of 8" in goes_on(cli, tmp_path, *([place] if place else []))
    assert sorted(path.name for path in (tmp_path / "scratch").glob("step-*")) == ["step-00000004", "step-00000008"]
    assert len(logged(run)) == 8


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00\n" * 3,
        b"[1]\n{}\n",
        b'{"step": 1, "loss": "x", "epoch": 0, "terms": 8}\n{}\n',
        b"[" * 99999 + b"\n1\n",
    ],
    ids=["binary", "other rows", "other types", "deep"],
)
@pytest.mark.parametrize("name", ["log.jsonl", "events.jsonl"])
def test_a_damaged_log_is_set_aside(cli: Cli, tmp_path: Path, name: str, content: bytes) -> None:
    run = one_epoch(cli, tmp_path)
    rows = (run / name).read_bytes()
    (run / name).write_bytes(content + rows)
    assert f"{name}.damaged" in goes_on(cli, tmp_path)
    assert (run / f"{name}.damaged").read_bytes() == content + rows
    assert [row[0] for row in logged(run)] == list(range(8))


def test_a_log_that_is_a_pipe(cli: Cli, tmp_path: Path) -> None:
    """It is not waited for."""
    run = one_epoch(cli, tmp_path)
    (run / "log.jsonl").unlink()
    os.mkfifo(run / "log.jsonl")
    goes_on(cli, tmp_path)
    assert [row[0] for row in logged(run)] == list(range(4, 8))


def test_a_folder_that_is_taken_away_is_said(cli: Cli, tmp_path: Path) -> None:
    """Status 4, and no word of files that are not there; what was saved later is whole."""
    workload = Path(spoilt(tmp_path, more="metrics={'gone': take_away},"))
    take = "import shutil\n\n\ndef take_away(output, target):\n    shutil.rmtree('run', ignore_errors=True)\n"
    take += "    return (0.0 * output).sum(), len(target)\n"
    workload.write_text(workload.read_text().replace("\nworkload =", take + "\n\nworkload ="))
    done = cli.on_ranks(tmp_path, "train", workload, "--out", "run", "--device", "cpu")
    assert done.status == 4, done
    assert "log.jsonl, events.jsonl, log.csv, epochs.csv" in done.err
    assert "wrote" not in done.out
