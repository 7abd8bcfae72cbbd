"""Who takes part in each start of a training, and what every change costs: out of what the starts before have left."""

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
    """The time, as the test sets it."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(memberships, "time", SimpleNamespace(time=lambda: now.seconds))
    return now


def start(run: Path, hosts: str, begin: int) -> tuple[Memberships, list[str]]:
    """A start of one rank on each of these hosts, and what it says."""
    said: list[str] = []
    world: Any = SimpleNamespace(size=len(hosts.split()), hosts=tuple(hosts.split()))
    return Memberships(run, world, begin, said.append), said


def log(run: Path, updates: int, last: float, more: str = "") -> None:
    rows = [{"step": step, "loss": 1.0, "time": last - (updates - 1 - step)} for step in range(updates)]
    (run / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + more)


def test_one_start_says_nothing(tmp_path: Path, clock: Any) -> None:
    own, said = start(tmp_path, "h0 h1", 0)
    own.first_update(1001.0)
    assert said == []
    assert own.rows == [Membership(1000.0, 2, ["h0", "h1"], 0)]
    assert json.loads((tmp_path / MEMBERSHIPS).read_text())["lost_seconds"] is None


def numbers(lines: list[str]) -> list[tuple[int, ...]]:
    """Ranks, ranks before if they differ, the update, updates repeated, seconds lost."""
    return [tuple(map(int, re.findall(r"(?<!\w)\d+", line))) for line in lines]


def test_a_host_is_lost_and_another_comes(tmp_path: Path, clock: Any) -> None:
    """The last update of the start before is in its log; the first of this one is the next that is logged."""
    start(tmp_path, "h0 h1 h2 h3", 0)[0].first_update(1001.0)
    log(tmp_path, 46, 1100.0, '{"step": 46, "lo')  # cut off by the kill
    clock.seconds = 1119.0
    own, said = start(tmp_path, "h1 h2 h3", 40)
    assert said == []
    assert own.rows[1] == Membership(1119.0, 3, ["h1", "h2", "h3"], 40, 6)
    own.first_update(1121.0)
    own.first_update(1122.0)
    assert numbers(said) == [(3, 4, 40, 6, 21)]
    assert "h1, h2, h3" in said[0]
    log(tmp_path, 50, 1130.0)
    own, said = start(tmp_path, "h1 h2 h3", 49)
    own.first_update(1132.0)
    assert numbers(said) == [(3, 49, 1, 2)]
    assert [row.lost_seconds for row in own.rows] == [None, 21.0, 2.0]
    assert start(tmp_path, "h1", 49)[0].rows[:3] == own.rows  # as they are read again


def test_a_start_that_does_no_update(tmp_path: Path, clock: Any) -> None:
    """What it would have lost is lost by the next: its log was cut, and the time of the last update with it."""
    start(tmp_path, "h0 h1", 0)[0].first_update(1001.0)
    log(tmp_path, 12, 1012.0)
    start(tmp_path, "h0", 10)
    log(tmp_path, 10, 1010.0)
    own, said = start(tmp_path, "h0", 10)
    own.first_update(1050.0)
    assert numbers(said) == [(1, 10, 0, 38)]
    assert [(row.repeated_updates, row.lost_seconds) for row in own.rows] == [(0, None), (2, None), (0, 38.0)]


def test_nothing_was_saved_before_the_loss(tmp_path: Path, clock: Any) -> None:
    """All is done again; and of a start that has logged nothing the loss counts from its own beginning."""
    start(tmp_path, "h0", 0)
    own, said = start(tmp_path, "h0", 0)
    own.first_update(1010.0)
    assert numbers(said) == [(1, 0, 0, 10)]
    log(tmp_path, 3, 1013.0)
    own, said = start(tmp_path, "h0", 0)
    own.first_update(1020.0)
    assert numbers(said) == [(1, 0, 3, 7)]


def test_a_training_that_came_to_its_end_has_lost_nothing(tmp_path: Path, clock: Any) -> None:
    """Somebody makes it longer a day later."""
    start(tmp_path, "h0", 0)[0].first_update(1001.0)
    log(tmp_path, 5, 1010.0, '{"final": {}}\n')
    own, said = start(tmp_path, "h0 h1", 5)
    own.first_update(9000.0)
    assert said == []
    assert own.rows[1] == Membership(1000.0, 2, ["h0", "h1"], 5)


def test_many_hosts_are_counted(tmp_path: Path, clock: Any) -> None:
    start(tmp_path, "h0", 0)
    own, said = start(tmp_path, " ".join(f"h{index}" for index in range(9)), 0)
    own.first_update(1001.0)
    assert said[0].startswith("9 ranks on 9 hosts (1 before): ")


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
def test_a_file_from_elsewhere(tmp_path: Path, clock: Any, row: str) -> None:
    """What is no row of ours is left out, and nothing fails."""
    (tmp_path / MEMBERSHIPS).write_text(row + "\n")
    (tmp_path / "log.jsonl").write_text("[1]\n" + '{"step": "x", "time": 3}\n')
    own, said = start(tmp_path, "h0", 0)
    own.first_update(1001.0)
    assert (len(own.rows), said) == (1, [])


def test_a_link_is_not_followed(tmp_path: Path, clock: Any) -> None:
    """The folder may come from elsewhere: what a link leads to is not written over."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / MEMBERSHIPS).symlink_to(tmp_path / "mine")
    (tmp_path / f"{MEMBERSHIPS}.partial").symlink_to(tmp_path / "mine")
    start(tmp_path, "h0", 0)
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / MEMBERSHIPS).is_symlink()
