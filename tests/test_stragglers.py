"""Ranks that are slower than the others: named during the run, with why; and no rank named that is not."""

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

from everyrank.launch.autopsy.lateness import Lateness, find_latest
from everyrank.layout import parse_layout
from everyrank.parallel.mesh import open_mesh
from everyrank.train.stragglers import StragglerWatch, why_late
from everyrank.world import World
from processes import Cli

_Arrivals = dict[str, list[list[Any]]]


def arrivals(late: Callable[[int, int], float], ranks: int = 3, buckets: int = 1) -> list[_Arrivals]:
    """What the ranks tell of 20 updates of 10 ms: `late(update, rank)` is how much later one comes, µs."""
    rows: list[_Arrivals] = [{"0": [list(range(ranks))]} for _ in range(ranks)]
    begun = 0.0
    for update in range(20):
        came = [begun + 10_000 + late(update, rank) for rank in range(ranks)]
        for bucket in range(buckets):  # called one after the other, before anybody waits
            for rank in range(ranks):
                rows[rank]["0"].append([buckets * update + bucket, came[rank] + 100 * bucket])
        begun = max(came)
    return rows


def test_who_comes_last() -> None:
    """A third of the time is lost to a rank that takes 15 ms where others take 10."""
    found = find_latest(arrivals(lambda _, rank: 5000 * (rank == 1)))
    assert found is not None
    assert (found.rank, found.part) == (1, 1.0)
    assert found.share == pytest.approx(5 / 15, rel=0.1)
    assert found.seconds == pytest.approx(0.005)


def test_buckets_of_one_update_count_once() -> None:
    """The same lateness shows in all collectives that are called before one of them is waited for."""
    found = find_latest(arrivals(lambda _, rank: 5000 * (rank == 2), buckets=4))
    assert found is not None
    assert found.rank == 2
    assert found.share == pytest.approx(5 / 15, rel=0.1)


def test_noise_is_nobodys() -> None:
    """Each is late now and then; and one that is late once, for long, saves a checkpoint."""
    draw = random.Random(3)
    found = find_latest(arrivals(lambda *_: 4000 * draw.random()))
    assert found is None or found.part < 0.7
    once = find_latest(arrivals(lambda update, rank: 200_000 * (update == 7 and rank == 0) + 100 * draw.random()))
    assert once is None
    assert find_latest([{}, {}]) is None
    assert find_latest([{"0": [[0, 1], [5, 100]]}, {}]) is None


def test_ranks_of_several_groups() -> None:
    """Of two pairs, the rank that is last in all that it takes part in."""
    rows = arrivals(lambda _, rank: 5000 * (rank == 1), ranks=2) + arrivals(lambda *_: 0, ranks=2)
    for row in rows[2:]:
        row["1"] = [[2, 3], *row.pop("0")[1:]]
    found = find_latest(rows)
    assert found is not None
    assert (found.rank, found.part) == (1, 1.0)


USUAL = {"wall": 10.0, "updates": 100, "data": 0.1, "cpu": 5.0, "runqueue": 0.0, "throttled": 0.0, "stolen": 0.0}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"data": 3.1}, "31 ms for each update against 1 ms"),
        ({"throttled": 3.0}, "(cpu.max), 30% of the time"),
        ({"stolen": 2.0}, "(steal), 20% of the time"),
        ({"runqueue": 4.0}, "no core 40% of the time"),
        ({"cpu": 9.5}, "it computes (95% of the time"),
        ({"cpu": 1.0}, "neither computes (10% of the time"),
    ],
    ids=["data", "throttled", "steal", "run queue", "compute", "asleep"],
)
def test_why(changes: Mapping[str, float], text: str) -> None:
    """From what each rank has used."""
    assert text in why_late(1, 0.3, [USUAL, USUAL | changes, USUAL])


def watch_updates(world: World, late: int | None) -> list[tuple[int, str] | None]:
    """What four looks find, each after ten updates, in which one rank sleeps."""
    watch = StragglerWatch(open_mesh(parse_layout("ddp"), world), windows=3)
    found: list[tuple[int, str] | None] = []
    for _ in range(4):
        for update in range(10):
            watch.fetched(0.0)
            pause = 0.08 if world.rank == late else 0.02 * ((update + world.rank) % world.size)
            time.sleep(pause)
            dist.all_reduce(torch.ones(3), group=world.group)
        slow = watch.look()
        found.append((slow.rank, slow.why) if slow is not None else None)
    return found


def test_a_slow_rank_is_named(ranks: Any) -> None:
    """In the third look, once, on all ranks alike."""
    found = ranks(2, watch_updates, 1)
    assert found[0] == found[1]
    assert [row[0] if row else None for row in found[0]] == [None, None, 1, None]
    assert found[0][2][1].startswith("it neither computes")


def test_nobody_is_named_where_ranks_take_turns(ranks: Any) -> None:
    """Each is late in every other update, by as much as the update takes."""
    assert ranks(2, watch_updates, None) == [[None] * 4] * 2


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
        time.sleep(0.02 * (dist.get_rank() == WHO))
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
@pytest.mark.parametrize("who", [1, None])
def test_a_training_names_it(cli: Cli, tmp_path: Path, backend: str, who: int | None) -> None:
    """On the screen and in the log, while it runs: rank 1 waits for its data."""
    (tmp_path / "mine.py").write_text(WORKLOAD.replace("WHO", str(who)))
    words = ("--layout", "ddp", "--processes", "2", "--out", "out", "--backend", backend)
    running = cli.start(tmp_path, "train", "mine.py", *words)
    status, stdout, stderr = running.end(200)
    assert status == 0, stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    slow = [row["straggler"] for row in rows if "straggler" in row]
    if who is None:
        assert slow == []
        assert "slower than the others" not in stdout
    else:
        assert [row["rank"] for row in slow] == [1]
        assert slow[0]["why"].startswith("it waits for data, ")
        assert "rank 1 is slower" in stdout


def test_how_it_is_said() -> None:
    """One line, with the share."""
    slow = Lateness(2, 0.314, 0.96, 0.0212, "it waits for data")
    assert re.match(r"rank 2 .*31% .*96% .*21 ms .*waits for data$", str(slow))
