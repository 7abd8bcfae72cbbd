"""Slow ranks are reported during the run, with a cause. Ranks that are not slow are not reported."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from everyrank.launch.autopsy.lateness import LateRank, find_late_rank
from everyrank.layout import parse_layout
from everyrank.parallel.mesh import open_mesh
from everyrank.train.stragglers import StragglerWatch, why_late
from everyrank.world import World
from processes import Cli

_Arrivals = dict[str, list[list[Any]]]
"""For each process group: first its ranks, then [index, arrival in µs] of each collective."""


def arrivals(delay_us: Callable[[int, int], float], ranks: int = 3, buckets: int = 1) -> list[_Arrivals]:
    """Return the arrival times of each rank in 20 updates of 10 ms. `delay_us(update, rank)` is how late a rank is."""
    rows: list[_Arrivals] = [{"0": [list(range(ranks))]} for _ in range(ranks)]
    start = 0.0
    for update in range(20):
        arrived = [start + 10_000 + delay_us(update, rank) for rank in range(ranks)]
        for bucket in range(buckets):  # all buckets are started before any rank waits for one
            for rank in range(ranks):
                rows[rank]["0"].append([buckets * update + bucket, arrived[rank] + 100 * bucket])
        start = max(arrived)
    return rows


def test_rank_that_arrives_last_is_found() -> None:
    """A third of the time is lost to a rank that takes 15 ms where others take 10."""
    late = find_late_rank(arrivals(lambda _, rank: 5000 * (rank == 1)))
    assert late is not None
    assert (late.rank, late.lateness_fraction) == (1, 1.0)
    assert late.wait_fraction == pytest.approx(5 / 15, rel=0.1)
    assert late.mean_seconds == pytest.approx(0.005)


def test_buckets_of_one_update_count_once() -> None:
    """DDP starts all buckets of an update before it waits for one, so all buckets show the same lateness."""
    late = find_late_rank(arrivals(lambda _, rank: 5000 * (rank == 2), buckets=4))
    assert late is not None
    assert late.rank == 2
    assert late.wait_fraction == pytest.approx(5 / 15, rel=0.1)


def test_random_lateness_is_not_reported() -> None:
    """If all ranks are late at random, none is reported. A rank that is late only once is not reported either."""
    rng = random.Random(3)
    late = find_late_rank(arrivals(lambda *_: 4000 * rng.random()))
    assert late is None or late.lateness_fraction < 0.7
    late_once = find_late_rank(
        arrivals(lambda update, rank: 200_000 * (update == 7 and rank == 0) + 100 * rng.random())
    )
    assert late_once is None
    assert find_late_rank([{}, {}]) is None
    assert find_late_rank([{"0": [[0, 1], [5, 100]]}, {}]) is None


def test_ranks_of_several_groups() -> None:
    """With two groups of two ranks, the rank that is last in all collectives of its group is found."""
    rows = arrivals(lambda _, rank: 5000 * (rank == 1), ranks=2) + arrivals(lambda *_: 0, ranks=2)
    for row in rows[2:]:
        row["1"] = [[2, 3], *row.pop("0")[1:]]
    late = find_late_rank(rows)
    assert late is not None
    assert (late.rank, late.lateness_fraction) == (1, 1.0)


USUAL = {"wall": 10.0, "updates": 100, "data": 0.1, "cpu": 5.0, "runqueue": 0.0, "throttled": 0.0, "stolen": 0.0}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"data": 3.1}, "31 ms per update (1 ms on the other ranks)"),
        ({"throttled": 3.0}, "(cpu.max) 30% of the time"),
        ({"throttled": 30.0}, "(cpu.max) 100% of the time"),
        ({"stolen": 2.0}, "(steal), 20% of the time"),
        ({"runqueue": 4.0}, "no core 40% of the time"),
        ({"cpu": 9.5}, "it computes (95% of the time"),
        ({"cpu": 1.0}, "neither computes (10% of the time"),
    ],
    ids=["data", "throttled", "throttled on several CPUs", "steal", "run queue", "compute", "asleep"],
)
def test_cause_of_lateness(changes: Mapping[str, float], text: str) -> None:
    """The cause follows from the time and the CPU time that each rank used."""
    assert text in why_late(1, 0.3, [USUAL, USUAL | changes, USUAL])


def watch_updates(world: World, slow_ranks: list[int | None]) -> list[tuple[int, str] | None]:
    """Return the result of a comparison of the ranks for each window of ten updates.

    `slow_ranks`: for each window, the rank that sleeps longer in every update. If it is None, the ranks take turns to
    sleep longer.
    """
    watch = StragglerWatch(open_mesh(parse_layout("ddp"), world), min_windows=3)
    results: list[tuple[int, str] | None] = []
    for slow_rank in slow_ranks:
        for update in range(10):
            watch.add_loading_time(0.0)
            pause = 0.08 if world.rank == slow_rank else 0.02 * ((update + world.rank) % world.size)
            time.sleep(pause)
            dist.all_reduce(torch.ones(3), group=world.group)
        slow = watch.compare()
        results.append((slow.rank, slow.why) if slow is not None else None)
    return results


def test_a_slow_rank_is_reported(ranks: Any) -> None:
    """It is reported in the third comparison, with the same result on all ranks.

    It is reported again only if no rank was slow in a window between.
    """
    results = ranks(2, watch_updates, [1, 1, 1, 1, None, 1, 1, 1])
    assert results[0] == results[1]
    assert [row[0] if row else None for row in results[0]] == [None, None, 1, None, None, None, None, 1]
    assert results[0][2][1].startswith("it neither computes")


def test_alternating_lateness_is_not_reported(ranks: Any) -> None:
    """Each rank sleeps 20 ms in every other update. Apart from that, an update takes almost no time."""
    assert ranks(2, watch_updates, [None] * 4) == [[None] * 4] * 2


WORKLOAD = """\
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from everyrank import Workload


class Slow(Dataset):
    deterministic = True

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.02 * (dist.get_rank() == SLOW_RANK))
        return torch.ones(3), torch.ones(2)


def loss(output, target):
    time.sleep(0.02)
    return ((output - target) ** 2).sum(), target.numel()


workload = Workload(
    name="mine",
    model=lambda: nn.Linear(3, 2),
    train_data=Slow,
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    global_batch=4,
    steps=250,
)
"""


@pytest.mark.integration
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("slow_rank", [1, None])
def test_train_reports_a_slow_rank(cli: Cli, tmp_path: Path, backend: str, slow_rank: int | None) -> None:
    """If rank 1 loads its data slowly, `train` prints this during the run and writes it to events.jsonl."""
    (tmp_path / "mine.py").write_text(WORKLOAD.replace("SLOW_RANK", str(slow_rank)))
    args = ("--layout", "ddp", "--processes", "2", "--out", "out", "--backend", backend)
    running = cli.start(tmp_path, "train", "mine.py", *args)
    status, stdout, stderr = running.end(200)
    assert status == 0, stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    slow = [row["straggler"] for row in rows if "straggler" in row]
    if slow_rank is None:
        assert slow == []
        assert "slower than the others" not in stdout
    else:
        assert [row["rank"] for row in slow] == [1]
        assert slow[0]["why"].startswith("it waits for data, ")
        assert "rank 1 is slower" in stdout


def test_lateness_message() -> None:
    """The message is one line with the share of the time that is lost."""
    slow = LateRank(2, 0.314, 0.96, 0.0212, "it waits for data")
    assert re.match(r"rank 2 .*31% .*96% .*21 ms .*waits for data$", str(slow))
