"""Saving: in the background, which checkpoints stay, and whatever is killed meanwhile, what has its name is whole."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import everyrank.checkpoint.saver
import zoo
from checkpointing import Going, everything_in, same, saves, training
from everyrank import Workload
from everyrank.checkpoint import SaveError
from everyrank.checkpoint.contents import tensors_of
from everyrank.runs import checkpoints_of, damage, find_checkpoint, is_better
from everyrank.strategies import Prepared
from everyrank.world import World
from forkserver import ForkServer

# --- in the background


def groups_after(world: World, folder: Path) -> list[int]:
    """How many process groups there are after one, two and three trainings have each saved."""
    counts = []
    for number in range(3):
        going = Going(world, zoo.workload("tied"), "ddp")
        going.updates(0, 1)
        going.saver(folder / str(number)).save(1, {})
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_one_group_for_all_that_is_saved(ranks: Any, tmp_path: Path) -> None:
    """The threads of each group of gloo wake up a hundred times a second, as long as the process lives."""
    for counts in ranks(2, groups_after, tmp_path):
        assert counts == [counts[0]] * 3


def are_apart(world: World, folder: Path) -> bool:
    going = Going(world, zoo.workload("tied"), "ddp")
    return going.saver(folder / "at once").group is not going.saver(folder / "later", in_background=True).group


def test_what_is_saved_in_the_background_has_a_group_apart(ranks: Any, tmp_path: Path) -> None:
    """Two threads of a rank on one group would take each other's answers, and wait for ever."""
    assert all(ranks(2, are_apart, tmp_path))


def with_rate_in_a_tensor(model: nn.Module) -> torch.optim.Optimizer:
    """torch changes such a rate in place, as it must where a graph of CUDA reads it."""
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))


def saves_twice(world: World, layout: str, workload: Workload, folder: Path) -> Any:
    """One checkpoint that was written at once, and one that is held up until the training has gone on."""
    going = Going(world, workload, layout)
    going.updates(0, 5)
    going.saver(folder / "at once").save(5, {"eval_loss": 0.5})
    gate = threading.Event()
    write = everyrank.checkpoint.saver.write

    def held_up(*arguments: Any) -> Any:
        assert gate.wait(30)
        return write(*arguments)

    everyrank.checkpoint.saver.write = held_up  # type: ignore[assignment]
    try:
        saver = going.saver(folder / "later", in_background=True)
        saver.save(5, {"eval_loss": 0.5})
        before = going.state()
        going.updates(5, 9)
        after = going.state()
        was_waiting = not checkpoints_of(saver.run)
        gate.set()
        saver.finish()
    finally:
        gate.set()
        everyrank.checkpoint.saver.write = write
    moved = [name for name, value in before[0].items() if not torch.equal(value, after[0][name])]
    return was_waiting, len(moved), before[1] != after[1]


@pytest.mark.parametrize("optimizer", ["sgd", "rate in a tensor"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_in_the_background_the_state_is_that_of_the_moment(
    ranks: Any, tmp_path: Path, layout: str, optimizer: str
) -> None:
    """What is written is what was there when `save` was called, to the last bit, whatever the training did since."""
    workload = training()
    if optimizer != "sgd":
        workload = dataclasses.replace(workload, optimizer=with_rate_in_a_tensor)
    for was_waiting, num_moved, values_moved in ranks(2, saves_twice, layout, workload, tmp_path):
        assert was_waiting
        assert num_moved > 5
        assert values_moved
    one, other = (find_checkpoint(tmp_path / name) for name in ("at once", "later"))
    assert damage(one) is None
    assert damage(other) is None
    (tensors, values), (tensors_later, values_later) = everything_in(one), everything_in(other)
    same(tensors, tensors_later)
    assert values == values_later
    assert dataclasses.replace(one.metadata, files={}) == dataclasses.replace(other.metadata, files={})


def fails_in_the_background(world: World, run: Path) -> tuple[str, list[int], int]:
    """Rank 1 alone cannot write; the error, what is whole after it, and what is after another attempt."""
    going = Going(world, training(), "fsdp")
    going.updates(0, 1)
    saver = going.saver(run, in_background=True)
    saver.save(1, {})
    saver.finish()
    error = ""
    with no_file_longer_than(3000) if world.rank == 1 else contextlib.nullcontext():
        saver.save(2, {})
        try:
            saver.finish()
        except SaveError as caught:
            error = str(caught)
    dist.barrier()
    there = [one.metadata.step for one in checkpoints_of(run) if damage(one) is None]
    dist.barrier()
    saver.save(3, {})
    saver.finish()
    dist.barrier()
    return error, there, find_checkpoint(run).metadata.step


@contextlib.contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """As if the disk were full, for this process alone (Python ignores SIGXFSZ: the write fails)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_one_rank_that_cannot_write(ranks: Any, tmp_path: Path) -> None:
    """All ranks learn of it, the checkpoint before stays, nothing unfinished is left, and the next attempt may do."""
    for error, there, last in ranks(2, fails_in_the_background, tmp_path):
        assert "File too large" in error
        assert "\n" not in error
        assert there == [1]
        assert last == 3
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000003"]


# --- which checkpoints stay


@pytest.mark.parametrize(
    ("name", "scores", "keep", "left", "best"),
    [
        ("eval_loss", [5.0, 3.0, 1.0, 4.0, 2.0, 6.0, 1.5], 2, [3, 6, 7], 3),
        ("top1", [0.5, 0.9, 0.1, 0.4, 0.2, 0.6, 0.3], 3, [2, 5, 6, 7], 2),
        ("top1", [0.1, 0.2, 0.3, 0.4], 2, [3, 4], 4),
        ("top1", [0.9, None, None, None], 1, [1, 4], 1),
        ("perplexity", [4.0, 9.0, 9.0, 9.0], 1, [1, 4], 1),
        ("eval_loss", [None] * 5, 2, [4, 5], None),
        ("top1", [0.4, 0.4, 0.4], 1, [1, 3], 1),
        ("eval_loss", [math.nan, 0.5, 0.7], 1, [2, 3], 2),
        ("wer", [0.5, 0.7, 0.9], 1, [1, 3], 1),
        ("points:min", [0.5, 0.7, 0.9], 1, [1, 3], 1),
        ("eval_loss:max", [0.5, 0.9, 0.7], 1, [2, 3], 2),
    ],
    ids=["loss", "top1", "the last", "once", "perplexity", "never", "a tie", "no number", "error", "min", "max"],
)
def test_the_last_and_the_best_stay(
    ranks: Any, tmp_path: Path, name: str, scores: list[float | None], keep: int, left: list[int], best: int | None
) -> None:
    """The last `keep`, and the best: a loss is better when lower, an accuracy when higher. `best` points at it."""
    (names,) = ranks(1, saves, tmp_path, name, scores, keep)
    assert names == [*(["best"] if best else []), *(f"step-{step:08d}" for step in left)]
    for one in checkpoints_of(tmp_path):
        assert damage(one) is None
    if best:
        assert find_checkpoint(tmp_path / "checkpoints" / "best").metadata.step == best
    assert find_checkpoint(tmp_path).metadata.step == len(scores)


def test_lower_is_better_for_a_loss_alone() -> None:
    assert is_better(0.1, 0.2, "eval_loss")
    assert not is_better(0.2, 0.1, "eval_loss")
    assert is_better(0.1, 0.2, "my_loss")
    assert is_better(0.1, 0.2, "perplexity")
    assert is_better(0.2, 0.1, "top1")
    assert not is_better(0.1, 0.2, "top1")
    assert not is_better(0.1, 0.1, "top1")
    assert is_better(0.1, None, "top1")


def test_going_on_from_an_older_one_keeps_what_it_saves(ranks: Any, tmp_path: Path) -> None:
    """The newest was damaged, and the training went on from the one before: what it saves must not be pruned."""
    ranks(1, saves, tmp_path, "top1", [None] * 6, 2)
    newest = find_checkpoint(tmp_path)
    (part,) = newest.path.glob("*.distcp")
    part.write_bytes(part.read_bytes()[:-10])
    (names,) = ranks(1, saves, tmp_path, "top1", [None], 1, 5)  # update 5 again, 6 is damaged
    assert "step-00000005" in names
    assert [one.metadata.step for one in checkpoints_of(tmp_path) if damage(one) is None] == [5]


# --- killed while saving


def kill_many(run: Path, seed: int, count: int) -> None:
    """In a process of its own: kill `count` children while they save, and look at the folder after each."""
    torch.set_num_threads(1)  # no thread may be running in what is forked
    chance = random.Random(seed)
    num_unfinished, num_whole = 0, 0
    for number in range(count):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_for_ever(run, writing, in_background=number % 2 == 1)
            finally:
                os._exit(1)
        os.close(writing)
        has_saved = os.read(reading, 1) == b"x"
        os.close(reading)
        time.sleep(chance.uniform(0.005, 0.08))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert has_saved, f"kill {number} of seed {seed}: it never saved"
        assert os.WTERMSIG(status) == signal.SIGKILL, f"kill {number} of seed {seed}: it ended by itself"
        num_unfinished += any((run / "checkpoints").glob("*.tmp"))
        try:
            num_whole += look_at(run)
        except Exception as error:
            raise AssertionError(f"kill {number} of seed {seed}: {error}") from error
    print(f"{num_unfinished} {num_whole}")


def save_for_ever(run: Path, writing: int, in_background: bool) -> None:
    """Save one step after another, every number in them being that of the step."""
    world = World(0, 1, 0, 1, torch.device("cpu"), "gloo", 1, 0, 60.0, None, None)  # type: ignore[arg-type]
    big = {"model": lambda: nn.Sequential(nn.Linear(5, 256), nn.Linear(256, 256), nn.Linear(256, 2))}
    going = Going(world, zoo.workload("frozen", blocks=None, **big), "single")
    going.updates(0, 1)  # now the optimizer has a state
    there = checkpoints_of(run)
    # the newest one is sometimes written again, as after going on from an older one
    step = there[-1].metadata.step + (len(there) < 3) if there else 1
    saver = going.saver(run, keep=2, in_background=in_background)
    is_first = True
    while True:
        fill(going.prepared, world, step)
        saver.save(step, {"eval_loss": float(step * 7919 % 101)})
        fill(going.prepared, world, -1)
        if is_first:
            saver.finish()
            os.write(writing, b"x")
            is_first = False
        step += 1


@torch.no_grad()
def fill(prepared: Prepared, world: World, value: int) -> None:
    for name, tensor in tensors_of(prepared.trainable, world).items():
        if not name.startswith("generators/"):
            tensor.fill_(value)
    prepared.trainable.optimizer.param_groups[0]["lr"] = float(value)


def look_at(run: Path) -> int:
    """Everything under a final name is whole and holds its step; how many that are."""
    there = checkpoints_of(run)
    named = sorted(path.name for path in (run / "checkpoints").glob("step-*") if not path.name.endswith(".tmp"))
    assert named == [one.path.name for one in there], f"{named} cannot all be read"
    assert there, "nothing is left"
    for one in there:
        assert damage(one) is None, f"{one.path.name}: {damage(one)}"
        tensors, values = everything_in(one)
        assert sum(name.startswith("optimizer/") for name in tensors) == 6
        for name, tensor in tensors.items():
            found = tensor.unique().tolist()
            assert name.startswith("generators/") or found == [one.metadata.step], (
                f"{one.path.name}: {name} holds {found}"
            )
        assert values["groups"][0]["lr"] == one.metadata.step, f"{one.path.name}: another step's values"
    best = run / "checkpoints" / "best"
    assert not best.is_symlink() or best.resolve() in [one.path.resolve() for one in there], "`best` leads nowhere"
    assert find_checkpoint(run).path == there[-1].path
    return len(there)


@pytest.mark.integration
def test_fifty_kills_leave_no_folder_that_cannot_be_loaded(python: ForkServer, tmp_path: Path) -> None:
    """SIGKILL at random moments of saving, in the background too: what has its name is whole, and there is some."""
    with (tmp_path / "said").open("w") as said, (tmp_path / "errors").open("w") as errors:
        status = python.fork(kill_many, tmp_path, 17, 50, streams=(None, said, errors)).wait(200)
    assert status == 0, (tmp_path / "errors").read_text()
    num_unfinished, num_whole = map(int, (tmp_path / "said").read_text().split())
    assert num_unfinished >= 10, "the kills were meant to hit in the middle"
    assert num_whole >= 100
