"""Resume in run folders that were changed: symbolic links, other disks and damaged logs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everyrank.record import read_records
from everyrank.runs import checkpoints_of, damage
from processes import Cli
from resuming import logged_updates, write_linear_workload

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="looking for left processes needs Linux's /proc"
)


def train_one_epoch(cli: Cli, folder: Path, *args: str) -> Path:
    """Train one epoch on one rank, and return the run folder."""
    result = cli.on_ranks(
        folder, "train", write_linear_workload(folder), "--epochs", "1", "--out", "run", "--device", "cpu", *args
    )
    assert result.status == 0, result
    return folder / "run"


def resume_run(cli: Cli, folder: Path, *args: str) -> str:
    """Resume the run in the folder, and return the output."""
    result = cli.on_ranks(
        folder, "train", write_linear_workload(folder), "--out", "run", "--device", "cpu", "--resume", *args
    )
    assert result.status == 0, result
    return result.out


def test_links_in_a_foreign_folder_are_not_written_through(cli: Cli, tmp_path: Path) -> None:
    """The targets of the links are unchanged, and the training is resumed."""
    run = train_one_epoch(cli, tmp_path)
    (tmp_path / "outside").mkdir()
    link_target = tmp_path / "mine"
    link_target.write_text("mine")
    log_names = ["log.jsonl", "log.csv", "events.jsonl", "epochs.csv"]
    for name in [*(f"{name}.partial" for name in log_names), *log_names[1:2], "record.json", "checkpoints/best.tmp"]:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(link_target)
    (run / "checkpoints" / "step-00000008.tmp").symlink_to(tmp_path / "outside")
    resume_run(cli, tmp_path)
    assert link_target.read_text() == "mine"
    assert not list((tmp_path / "outside").iterdir())
    assert [(checkpoint.metadata.step, damage(checkpoint)) for checkpoint in checkpoints_of(run)] == [
        (4, None),
        (8, None),
    ]
    assert len(read_records(run / "record.json")[0].loss) == 8


@pytest.mark.parametrize("resume_path", ["", "run", "run/checkpoints/best", "run/checkpoints/step-00000004"])
def test_checkpoints_may_be_on_another_disk(cli: Cli, tmp_path: Path, resume_path: str) -> None:
    """The checkpoint folder is a link to a different folder."""
    run = train_one_epoch(cli, tmp_path)
    (run / "checkpoints").rename(tmp_path / "scratch")
    (run / "checkpoints").symlink_to(tmp_path / "scratch")
    assert "after update 4 of 8" in resume_run(cli, tmp_path, *([resume_path] if resume_path else []))
    assert sorted(path.name for path in (tmp_path / "scratch").glob("step-*")) == ["step-00000004", "step-00000008"]
    assert len(logged_updates(run)) == 8


@pytest.mark.parametrize(
    "damaged_lines",
    [
        b"\xff\xfe\x00\n" * 3,
        b"[1]\n{}\n",
        b'{"step": 1, "loss": "x", "epoch": 0, "terms": 8}\n{}\n',
        b"[" * 99999 + b"\n1\n",
    ],
    ids=["binary", "other rows", "other types", "deep"],
)
@pytest.mark.parametrize("name", ["log.jsonl", "events.jsonl"])
def test_damaged_log_is_renamed(cli: Cli, tmp_path: Path, name: str, damaged_lines: bytes) -> None:
    """It is renamed, and the log is written again with all updates."""
    run = train_one_epoch(cli, tmp_path)
    valid_content = (run / name).read_bytes()
    (run / name).write_bytes(damaged_lines + valid_content)
    assert f"{name}.damaged" in resume_run(cli, tmp_path)
    assert (run / f"{name}.damaged").read_bytes() == damaged_lines + valid_content
    assert [row[0] for row in logged_updates(run)] == list(range(8))


def test_log_that_is_a_named_pipe_is_replaced(cli: Cli, tmp_path: Path) -> None:
    """Opening a pipe without a reader would wait. The resumed run does not wait."""
    run = train_one_epoch(cli, tmp_path)
    (run / "log.jsonl").unlink()
    os.mkfifo(run / "log.jsonl")
    resume_run(cli, tmp_path)
    assert [row[0] for row in logged_updates(run)] == list(range(4, 8))


def test_deleted_run_folder_is_reported(cli: Cli, tmp_path: Path) -> None:
    """The exit code is 4. The error lists the missing files, and the output lists none of them."""
    workload = Path(write_linear_workload(tmp_path, more_fields="metrics={'gone': take_away},"))
    take_away_source = (
        "import shutil\n\n\ndef take_away(output, target):\n    shutil.rmtree('run', ignore_errors=True)\n"
    )
    take_away_source += "    return (0.0 * output).sum(), len(target)\n"
    workload.write_text(workload.read_text().replace("\nworkload =", take_away_source + "\n\nworkload ="))
    result = cli.on_ranks(tmp_path, "train", workload, "--out", "run", "--device", "cpu")
    assert result.status == 4, result
    assert "log.jsonl, events.jsonl, log.csv, epochs.csv" in result.err
    assert "wrote" not in result.out
