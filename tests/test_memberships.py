"""The restart history: ranks and hosts of each start, repeated updates, and time lost by each restart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everyrank.record import Membership
from everyrank.train import memberships
from everyrank.train.memberships import MEMBERSHIPS, Memberships


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The time in seconds, which the test sets."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(memberships, "time", SimpleNamespace(time=lambda: now.seconds))
    return now


def start(run: Path, hosts: str, start_step: int) -> tuple[Memberships, list[str]]:
    """Start one rank on each of these hosts. Return the history and the list that its printed lines are added to."""
    lines: list[str] = []
    world: Any = SimpleNamespace(size=len(hosts.split()), hosts=tuple(hosts.split()))
    return Memberships(run, world, start_step, lines.append), lines


def log(run: Path, updates: int, last_time: float, more: str = "") -> None:
    """Write a training log with a row per second; `last_time` is the time of the last update."""
    rows = [{"step": step, "loss": 1.0, "time": last_time - (updates - 1 - step)} for step in range(updates)]
    (run / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + more)


def test_first_start_prints_nothing(tmp_path: Path, clock: Any) -> None:
    history, lines = start(tmp_path, "h0 h1", 0)
    history.first_update(1001.0)
    assert lines == []
    assert history.rows == [Membership(1000.0, 2, ["h0", "h1"], 0)]
    assert json.loads((tmp_path / MEMBERSHIPS).read_text())["lost_seconds"] is None


def numbers(lines: list[str]) -> list[tuple[int, ...]]:
    """Return the numbers in each line: ranks, previous ranks if different, update, repeated updates, lost seconds."""
    return [tuple(map(int, re.findall(r"(?<!\w)\d+", line))) for line in lines]


def test_lost_seconds_after_the_loss_of_a_host(tmp_path: Path, clock: Any) -> None:
    """They are the seconds from the last logged update of the previous start to the first update of this start."""
    start(tmp_path, "h0 h1 h2 h3", 0)[0].first_update(1001.0)
    log(tmp_path, 46, 1100.0, '{"step": 46, "lo')  # the kill has cut off this row
    clock.seconds = 1119.0
    history, lines = start(tmp_path, "h1 h2 h3", 40)
    assert lines == []
    assert history.rows[1] == Membership(1119.0, 3, ["h1", "h2", "h3"], 40, 6)
    history.first_update(1121.0)
    history.first_update(1122.0)
    assert numbers(lines) == [(3, 4, 40, 6, 21)]
    assert "h1, h2, h3" in lines[0]
    log(tmp_path, 50, 1130.0)
    history, lines = start(tmp_path, "h1 h2 h3", 49)
    history.first_update(1132.0)
    assert numbers(lines) == [(3, 49, 1, 2)]
    assert [row.lost_seconds for row in history.rows] == [None, 21.0, 2.0]
    assert start(tmp_path, "h1", 49)[0].rows[:3] == history.rows  # the next start reads the same rows


def test_start_without_updates_adds_its_lost_seconds_to_the_next(tmp_path: Path, clock: Any) -> None:
    """The start without updates has truncated the log, so the time of the last update comes from its row."""
    start(tmp_path, "h0 h1", 0)[0].first_update(1001.0)
    log(tmp_path, 12, 1012.0)
    start(tmp_path, "h0", 10)
    log(tmp_path, 10, 1010.0)
    history, lines = start(tmp_path, "h0", 10)
    history.first_update(1050.0)
    assert numbers(lines) == [(1, 10, 0, 38)]
    assert [(row.repeated_updates, row.lost_seconds) for row in history.rows] == [(0, None), (2, None), (0, 38.0)]


def test_restart_without_a_checkpoint_repeats_all_updates(tmp_path: Path, clock: Any) -> None:
    """If the previous start has logged no update, the lost seconds count from its beginning."""
    start(tmp_path, "h0", 0)
    history, lines = start(tmp_path, "h0", 0)
    history.first_update(1010.0)
    assert numbers(lines) == [(1, 0, 0, 10)]
    log(tmp_path, 3, 1013.0)
    history, lines = start(tmp_path, "h0", 0)
    history.first_update(1020.0)
    assert numbers(lines) == [(1, 0, 3, 7)]


def test_finished_training_has_lost_no_time(tmp_path: Path, clock: Any) -> None:
    """For example, the user resumes a finished training for more updates hours later."""
    start(tmp_path, "h0", 0)[0].first_update(1001.0)
    log(tmp_path, 5, 1010.0, '{"final": {}}\n')
    history, lines = start(tmp_path, "h0 h1", 5)
    history.first_update(9000.0)
    assert lines == []
    assert history.rows[1] == Membership(1000.0, 2, ["h0", "h1"], 5)


def test_many_hosts_are_counted_and_not_listed(tmp_path: Path, clock: Any) -> None:
    start(tmp_path, "h0", 0)
    history, lines = start(tmp_path, " ".join(f"h{index}" for index in range(9)), 0)
    history.first_update(1001.0)
    assert lines[0].startswith("9 ranks on 9 hosts (1 before): ")


@pytest.mark.parametrize(
    "row",
    [
        "[]",
        "{}",
        '{"started": 1, "world_size": "4", "hosts": [], "first_update": 0, "repeated_updates": 0, "since": null}',
        '{"started": 1, "world_size": 4, "hosts": [3], "first_update": 0, "repeated_updates": 0, "since": null}',
        '{"started": NaN, "world_size": 4, "hosts": [], "first_update": 0, "repeated_updates": 0, "since": null}',
        '{"started": 1, "world_size": 4, "hosts": [], "first_update": 0, "repeated_updates": 0, "since": "1"}',
        "\x00\x00",
    ],
)
def test_invalid_rows_in_the_file_are_ignored(tmp_path: Path, clock: Any, row: str) -> None:
    """The history has only the row of this start, and nothing is printed."""
    (tmp_path / MEMBERSHIPS).write_text(row + "\n")
    (tmp_path / "log.jsonl").write_text("[1]\n" + '{"step": "x", "time": 3}\n')
    history, lines = start(tmp_path, "h0", 0)
    history.first_update(1001.0)
    assert (len(history.rows), lines) == (1, [])


def test_symlinks_in_place_of_the_file_are_not_followed(tmp_path: Path, clock: Any) -> None:
    """The folder may come from an untrusted source, so the target of a link is not overwritten."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / MEMBERSHIPS).symlink_to(tmp_path / "mine")
    (tmp_path / f"{MEMBERSHIPS}.partial").symlink_to(tmp_path / "mine")
    start(tmp_path, "h0", 0)
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / MEMBERSHIPS).is_symlink()
