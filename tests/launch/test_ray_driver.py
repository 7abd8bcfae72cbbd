"""The Ray driver with simulated actors: Ray is not needed."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from everyrank.launch import RankInfo, ray
from everyrank.launch.job import Job
from everyrank.launch.supervisor import write_whole
from everyrank.script.variables import rank_variables

NAME = "everyrank.launch.ray_driver"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import the driver with a module `ray` whose remote calls are local."""
    ray: Any = ModuleType("ray")
    ray.remote, ray.get = lambda kind: kind, lambda results: results
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util", ModuleType("ray.util"))
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    module = importlib.import_module(NAME)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.0)
    yield module
    sys.modules.pop(NAME)


class Actor:
    """A rank that returns these rows from `take`, one after the other."""

    def __init__(self, *rows: tuple[dict[str, bytes], int | None]) -> None:
        self.rows, self.given = list(rows), list[tuple[str, bytes]]()
        self.take = SimpleNamespace(remote=lambda: self.rows.pop(0) if len(self.rows) > 1 else self.rows[0])
        self.give = SimpleNamespace(remote=lambda *file: self.given.append(file))


RUNS, ENDED = ({}, None), ({}, 0)


def job(logs: Path) -> Job:
    """Return a job with two ranks."""
    return Job(b"", [], "ray", 2, None, "", 1, logs, keeps_logs=True)


def test_ranks_report_their_errors_after_the_first_failure(driver: Any, tmp_path: Path) -> None:
    """A wrong workload fails on all ranks, and not all at once."""
    failures = [({f"rank{rank}.error": b"{}"}, 1) for rank in range(2)]
    ended = driver._follow([Actor(failures[0]), Actor(RUNS, RUNS, RUNS, failures[1])], None, tmp_path, job(tmp_path))
    assert ended == (1, True)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["rank0.error", "rank1.error"]


def test_rank_that_waits_for_a_failed_one_is_ended(
    driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_GRACE_SECONDS", 0.0)
    assert driver._follow([Actor(({}, -9)), Actor(RUNS)], None, tmp_path, job(tmp_path)) == (9, True)


def test_each_signal_is_passed_on(driver: Any, tmp_path: Path) -> None:
    """SIGTERM may follow SIGUSR1. Ranks then have the time of --grace, also if one has ended."""

    class Stopping(Actor):
        def __init__(self) -> None:
            super().__init__(RUNS)
            self.take = SimpleNamespace(remote=self.next)

        def next(self) -> tuple[dict[str, bytes], int | None]:
            requests = [content for _, content in self.given]
            (tmp_path / "stop").write_bytes(b"2 15" if requests else b"1 10")
            return ENDED if requests[-1:] == [b"2 15"] else RUNS

    actors = [Stopping(), Actor(RUNS, RUNS, ({}, 143)), Actor(*[RUNS] * 5, ENDED)]
    assert driver._follow(actors, None, tmp_path, job(tmp_path)) == (143, True)
    assert all(actor.given == [("stop", b"1 10"), ("stop", b"2 15")] for actor in actors)


def test_ranks_that_start_again_get_no_earlier_sigusr1(driver: Any, tmp_path: Path) -> None:
    (tmp_path / "stop").write_bytes(b"1 10")
    actor = Actor(RUNS, ENDED)
    assert driver._follow([actor], None, tmp_path, job(tmp_path)) == (0, False)
    assert actor.given == []


def test_each_preliminary_result_is_copied(driver: Any, tmp_path: Path) -> None:
    """`info.keep` replaces it. A bench that is interrupted shows the rows that it has."""
    actor = driver.RankActor()
    actor.process = subprocess.Popen([sys.executable, "-c", ""])
    actor.process.wait()
    copied: list[dict[str, bytes]] = []
    for content in (b"one", b"two", None):
        if content is not None:
            write_whole(actor.folder / "rank0.kept", content)
        copied.append(actor.take()[0])
    actor.end()
    assert copied == [{"rank0.kept": b"one"}, {"rank0.kept": b"two"}, {}]


def test_address_of_a_script_reaches_the_other_actors(driver: Any, tmp_path: Path) -> None:
    """Under `everyrank launch`, rank 0 writes it to a different file than under `train`."""
    rank_0, rank_1 = driver.RankActor(), driver.RankActor()
    rank_0.process = SimpleNamespace(poll=lambda: None)
    infos = [
        RankInfo(rank, 0, 2, 1, "ray", f"meet://{actor.folder}/address") for rank, actor in enumerate((rank_0, rank_1))
    ]
    expected = rank_variables(infos[0], 5.0)["MASTER_PORT"]
    rank_1.give = SimpleNamespace(remote=rank_1.give)
    for name, content in rank_0.take()[0].items():
        driver._copy_file(name, content, tmp_path, job(tmp_path), [rank_0, rank_1])
    assert rank_variables(infos[1], 0.1)["MASTER_PORT"] == expected
    for actor in (rank_0, rank_1):
        shutil.rmtree(actor.folder)


def test_ranks_know_the_number_of_their_node(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """GROUP_RANK of a script. Ray may place two ranks on one node and one on another."""
    starts: list[Any] = []
    actor = SimpleNamespace(start=SimpleNamespace(remote=lambda *args: starts.append(args)))
    driver._start([actor] * 3, [("a", []), ("a", []), ("b", [])], b"")
    assert [numbers for _, _, numbers, _, _ in starts] == [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)]
    for (rank, size, local_rank, local_size), node in [(row[2], row[3]) for row in starts]:
        for name, number in zip(ray.NODE_VARIABLES, node, strict=True):
            monkeypatch.setenv(name, str(number))
        variables = rank_variables(RankInfo(rank, local_rank, size, local_size, "ray", "tcp://n1:29500"), 5.0)
        assert (variables["GROUP_RANK"], variables["GROUP_WORLD_SIZE"]) == (str(rank // 2), "2")
