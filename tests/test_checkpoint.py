"""Checkpoints: a training that was saved goes on as if it had never stopped, and whatever is on the disk is whole."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LinearLR, LRScheduler, MultiStepLR, SequentialLR

import everyrank.checkpoint.saver
import zoo
from everyrank import Workload, parse_layout
from everyrank.checkpoint import SaveError, Saver, aliases_of, export, resume
from everyrank.checkpoint.contents import tensors_of, values_of
from everyrank.checkpoint.storage import contents_of, read, read_values
from everyrank.cli import main
from everyrank.data import all_updates, updates_per_epoch
from everyrank.errors import UsageError
from everyrank.loop import run_updates
from everyrank.runs import About, Checkpoint, checkpoint_named, checkpoints_of, damage, find_checkpoint, is_better
from everyrank.runs.about import with_sum
from everyrank.strategies import Prepared, prepare
from everyrank.workload import find_workload, load
from everyrank.world import World
from forkserver import ForkServer, run_python

# --- a training that has everything that could be forgotten


class Mixed(nn.Module):
    """A tied weight, batch norm, a frozen layer, buffers of two kinds, a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5)) for _ in range(2)
        )
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(5, 5)
        self.last.weight = self.first.weight
        self.head = nn.Linear(5, 2)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("offset", torch.full((2,), 0.25))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        values = self.frozen(self.first(values))
        for block in self.blocks:
            values = values + block(values)
        return self.head(self.last(values)) * self.temperature + self.offset


def schedule(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Two schedules in a row: both are stepped before and after the checkpoint."""
    parts: list[LRScheduler] = [LinearLR(optimizer, 0.3, total_iters=3), MultiStepLR(optimizer, [4, 6], 0.5)]
    return SequentialLR(optimizer, parts, milestones=[3])


def training(optimizer: str = "sgd", **changes: Any) -> Workload:
    """23 samples with noise from three generators in batches of 7: updates of 7, 7, 7 and 2 samples."""
    common = {"model": Mixed, "blocks": "blocks", "clip_norm": 0.5, "schedule": schedule}
    return zoo.workload("augmented", optimizer, **(common | changes))


SAVED, END = 6, 11  # in the middle of the second epoch and of the third


class Going:
    """A training in one rank that can be driven update by update."""

    def __init__(self, world: World, workload: Workload, layout: str) -> None:
        self.world, self.workload, self.layout = world, workload, parse_layout(layout)
        self.data = workload.train_data()
        self.prepared: Prepared = prepare(workload, self.layout, world)

    def about(self, best_by: str = "eval_loss") -> About:
        workload, per_epoch = self.workload, updates_per_epoch(len(self.data), self.workload.global_batch)
        where = {"layout": str(self.layout), "world_size": self.world.size}
        what = {"workload": workload.name, "settings": {}, "seed": workload.seed, "samples": len(self.data)}
        how = {"global_batch": workload.global_batch, "clip_norm": workload.clip_norm, "data_checksum": None}
        more = {"updates_per_epoch": per_epoch, "best_by": best_by, "versions": {}, "time": ""}
        return About(step=0, aliases=aliases_of(self.prepared.model), **where, **what, **how, **more)

    def updates(self, begin: int, end: int) -> list[Tensor]:
        """This rank's shares of (sum, count)."""
        per_epoch = updates_per_epoch(len(self.data), self.workload.global_batch)
        chosen = list(all_updates(end, per_epoch))[begin:]
        shares = run_updates(self.prepared, self.data, chosen)
        return [share.clone() for share in shares]

    def saver(self, run: Path, keep: int = 3, in_background: bool = False, best_by: str = "eval_loss") -> Saver:
        return Saver(run, self.prepared, self.world, self.about(best_by), keep, in_background)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that this rank has."""
        found = tensors_of(self.prepared.trainable, self.world)
        local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in found.items()}
        return {name: value.clone() for name, value in local.items()}, copy.deepcopy(values_of(self.prepared.trainable))


def everything_in(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors and all values of a checkpoint, whatever layout wrote it."""
    tensors = {
        name: torch.zeros(kept.size, dtype=kept.properties.dtype) for name, kept in contents_of(checkpoint).items()
    }
    read(tensors, checkpoint)
    return tensors, read_values(checkpoint)


def same(one: dict[str, Tensor], other: dict[str, Tensor], relative: float = 0.0) -> None:
    """The same names, and the same numbers: to the last bit, or as nearly as that."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        if relative:
            torch.testing.assert_close(value, other[name], rtol=relative, atol=relative, equal_nan=True, msg=name)
        else:
            assert value.dtype == other[name].dtype, name
            assert torch.equal(value.nan_to_num(), other[name].nan_to_num()), name


# --- A: a fresh process goes on where another one was


def interrupted(world: World, layout: str, workload: Workload, workers: int, run: Path, saved: int = SAVED) -> Any:
    """What a whole training does after `saved` updates, and what a fresh one does that goes on from its checkpoint."""
    world = dataclasses.replace(world, loader_workers=workers)
    whole = Going(world, workload, layout)
    whole.updates(0, saved)
    whole.saver(run).save(saved, {})
    at_save = whole.state()
    expected = (whole.updates(saved, END), *whole.state())
    again = Going(world, workload, layout)
    first = again.updates(0, 2)  # a model that is not fresh at all: everything has to be put back
    begun = resume(again.prepared, world, find_checkpoint(run), again.about())
    assert first
    return {"begun": begun, "at_save": (at_save, again.state()), "whole": expected} | {
        "again": (again.updates(begun, END), *again.state())
    }


@pytest.mark.parametrize(
    ("strategy", "optimizer", "workers"),
    [
        *((strategy, optimizer, 0) for strategy in ("ddp", "zero1", "fsdp") for optimizer in ("sgd", "adamw")),
        ("ddp", "adamw", 2),
        ("zero1", "adamw", 2),
        ("fsdp", "sgd", 2),
    ],
)
def test_two_ranks_go_on_to_the_last_bit(
    ranks: Any, tmp_path: Path, strategy: str, optimizer: str, workers: int
) -> None:
    """Losses and final state after a checkpoint in mid-epoch are those of the run that was not interrupted."""
    rows = ranks(2, interrupted, f"{strategy}:precision=float64", training(optimizer), workers, tmp_path)
    for row in rows:
        assert row["begun"] == SAVED
        assert len(row["again"][0]) == END - SAVED
        (then, values_then), (now, values_now) = row["at_save"]
        same(then, now)
        assert values_then == values_now
        for one, other in zip(row["whole"][0], row["again"][0], strict=True):
            assert torch.equal(one, other)
        same(row["whole"][1], row["again"][1])
        assert row["whole"][2] == row["again"][2]
        assert int(row["again"][1]["model/calls"]) == END


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_go_on_alike(ranks: Any, tmp_path: Path, strategy: str, size: int) -> None:
    """On three and four ranks, where the last batch of an epoch has fewer samples than ranks, to 1e-12."""
    optimizer = "adamw" if size == 3 else "sgd"
    for row in ranks(size, interrupted, f"{strategy}:precision=float64", training(optimizer), 0, tmp_path):
        torch.testing.assert_close(row["whole"][0], row["again"][0], rtol=1e-12, atol=1e-13)
        same(row["whole"][1], row["again"][1], relative=1e-12)
        assert row["whole"][2] == row["again"][2]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_the_loss_scale_goes_on(ranks: Any, tmp_path: Path, strategy: str) -> None:
    """fp16: after overflows the scale has moved, and a fresh run begins with that scale and its count of good steps."""
    rows = ranks(2, scaled, strategy, tmp_path)
    for before, after, whole, again in rows:
        assert before == after
        assert before[0] < 65536.0, "the workload was meant to overflow"
        assert before[1] > 0, "and then to have good steps"
        for one, other in zip(whole[0], again[0], strict=True):
            assert torch.equal(one, other)
        same(whole[1], again[1])
        assert whole[2] == again[2]


def scaled(world: World, strategy: str, run: Path) -> Any:
    def loss(output: Any, target: Any) -> Any:
        total, count = zoo.squared(output, target)
        return total * 3.0, count  # its gradient does not fit into fp16 at the first scale

    workload = zoo.workload("frozen", loss=loss)
    whole = Going(world, workload, f"{strategy}:precision=fp16")
    whole.updates(0, SAVED)
    whole.saver(run).save(SAVED, {})
    scale = whole.prepared.trainable.scaler
    assert scale is not None
    before = (scale.scale, scale.good_steps)
    expected = (whole.updates(SAVED, END), *whole.state())
    again = Going(world, workload, f"{strategy}:precision=fp16")
    resume(again.prepared, world, find_checkpoint(run), again.about())
    scale = again.prepared.trainable.scaler
    assert scale is not None
    after = (scale.scale, scale.good_steps)
    return before, after, expected, (again.updates(SAVED, END), *again.state())


def drawing(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """A loss that draws from generators nobody reseeds; another stream on every rank, and normal numbers in pairs."""
    for _ in range(dist.get_rank()):
        random.random()
        np.random.rand()
    total, count = zoo.squared(output, target)
    return total * (1.0 + 0.1 * random.gauss(0.0, 1.0) + 0.1 * float(np.random.standard_normal())), count


@pytest.mark.parametrize("saved", [5, 6])  # the second number of a pair is, or is not, still to be given out
def test_generators_of_python_and_numpy_go_on(ranks: Any, tmp_path: Path, saved: int) -> None:
    """A model of a person's own that draws from them goes on to the last bit, each rank with its own stream."""
    workload = zoo.workload("frozen", loss=drawing)
    rows = ranks(2, interrupted, "ddp:precision=float64", workload, 0, tmp_path, saved)
    for row in rows:
        for one, other in zip(row["whole"][0], row["again"][0], strict=True):
            assert torch.equal(one, other)
        same(row["whole"][1], row["again"][1])
    own = [row["whole"][1][f"generators/{rank}"] for rank, row in enumerate(rows)]
    assert not torch.equal(*own), "the ranks were meant to draw differently"


# --- B: another layout on another number of ranks


def begins(world: World, layout: str, optimizer: str, run: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """A whole training that saves in the middle: the shares after that, and the model at the end."""
    going = Going(world, training(optimizer), f"{layout}:precision=float64")
    going.updates(0, SAVED)
    going.saver(run).save(SAVED, {})
    return going.updates(SAVED, END), going.prepared.state()


def goes_on(world: World, layout: str, optimizer: str, run: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    going = Going(world, training(optimizer), f"{layout}:precision=float64")
    begun = resume(going.prepared, world, find_checkpoint(run), going.about())
    return going.updates(begun, END), going.prepared.state()


def losses_of(rows: list[tuple[list[Tensor], Any]]) -> list[float]:
    """The losses of all ranks together."""
    totals = [torch.stack(shares).sum(0) for shares in zip(*(row[0] for row in rows), strict=True)]
    return [float(total[0] / total[1]) for total in totals]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("saved", "then"),
    [
        (("fsdp", 4), [("ddp", 2), ("zero1", 3), ("single", 1)]),
        (("single", 1), [("fsdp", 3)]),
        (("zero1", 3), [("ddp", 2), ("fsdp", 4)]),
    ],
    ids=["from fsdp", "from single", "from zero1"],
)
def test_another_layout_goes_on(
    ranks: Any, tmp_path: Path, optimizer: str, saved: tuple[str, int], then: list[tuple[str, int]]
) -> None:
    """The state of the optimizer too is cut anew: losses and model are those of the run that was not interrupted."""
    whole = ranks(saved[1], begins, saved[0], optimizer, tmp_path)
    expected = losses_of(whole)
    for layout, size in then:
        rows = ranks(size, goes_on, layout, optimizer, tmp_path)
        assert losses_of(rows) == pytest.approx(expected, rel=1e-10, abs=0.0), (layout, size)
        same(rows[0][1], whole[0][1], relative=1e-10)


# --- C: in the background


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
        was_waiting = saver.newest() is None
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
    assert dataclasses.replace(one.about, files={}) == dataclasses.replace(other.about, files={})


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
    there = [one.about.step for one in checkpoints_of(run) if damage(one) is None]
    dist.barrier()
    saver.save(3, {})
    saver.finish()
    dist.barrier()
    return error, there, find_checkpoint(run).about.step


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


# --- D: which checkpoints stay


def saves(world: World, run: Path, name: str, scores: list[float | None], keep: int, first: int = 1) -> list[str]:
    """Save with one score after another; the names that are in the folder in the end."""
    going = Going(world, zoo.workload("frozen"), "single")
    saver = going.saver(run, keep=keep, best_by=name)
    for step, score in enumerate(scores, first):
        saver.save(step, {} if score is None else {name.partition(":")[0]: score})
    return sorted(path.name for path in (run / "checkpoints").iterdir())


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
        assert find_checkpoint(tmp_path / "checkpoints" / "best").about.step == best
    assert find_checkpoint(tmp_path).about.step == len(scores)


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
    assert [one.about.step for one in checkpoints_of(tmp_path) if damage(one) is None] == [5]


# --- E: killed while saving


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
    step = there[-1].about.step + (len(there) < 3) if there else 1
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
            assert name.startswith("generators/") or found == [one.about.step], f"{one.path.name}: {name} holds {found}"
        assert values["groups"][0]["lr"] == one.about.step, f"{one.path.name}: another step's values"
    best = run / "checkpoints" / "best"
    assert not best.is_symlink() or best.resolve() in [one.path.resolve() for one in there], "`best` leads nowhere"
    assert find_checkpoint(run).path == there[-1].path
    return len(there)


def test_fifty_kills_leave_no_folder_that_cannot_be_loaded(forkserver: ForkServer, tmp_path: Path) -> None:
    """SIGKILL at random moments of saving, in the background too: what has its name is whole, and there is some."""
    with (tmp_path / "said").open("w") as said, (tmp_path / "errors").open("w") as errors:
        status = forkserver.start(kill_many, tmp_path, 17, 50, streams=(None, said, errors)).wait(200)
    assert status == 0, (tmp_path / "errors").read_text()
    num_unfinished, num_whole = map(int, (tmp_path / "said").read_text().split())
    assert num_unfinished >= 10, "the kills were meant to hit in the middle"
    assert num_whole >= 100


# --- F: what is damaged, foreign or hostile


DIGITS = ("train", "digits", "--set", "width=4", "--steps", "6", "--device", "cpu")


@pytest.fixture(scope="module")
def _saved_once(everyrank: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    words = ("--layout", "ddp", "--processes", "2", "--save-every", "2", "--evaluate-every", "0", "--out", "run")
    done = everyrank(folder, *DIGITS, *words)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def run_folder(_saved_once: Path, tmp_path: Path) -> Path:
    """A run of two ranks with checkpoints after the updates 2, 4 and 6."""
    return Path(shutil.copytree(_saved_once, tmp_path / "run", symlinks=True))


def step(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step-{number:08d}"


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line with which the command line ends, with status 2."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        status = main([str(word) for word in words])
    finally:
        signal.signal(signal.SIGTERM, before)
    printed = capsys.readouterr()
    assert status == 2, printed.out + printed.err
    return one_line(printed.err)


def one_line(stderr: str) -> str:
    assert "Traceback" not in stderr
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("everyrank: "), stderr
    return lines[0]


def change_about(folder: Path, **changes: Any) -> None:
    """As somebody would who changes it on purpose: its own sum is right again."""
    about = json.loads((folder / "about.json").read_text())
    del about["crc"]
    (folder / "about.json").write_text(with_sum(about | changes))


def sum_again(folder: Path, *names: str) -> None:
    """Make sizes and sums in about.json those of the files, as somebody would who has changed them on purpose."""
    files = json.loads((folder / "about.json").read_text())["files"]
    for name in names:
        content = (folder / name).read_bytes()
        files[name] = [len(content), zlib.crc32(content)]
    change_about(folder, files=files)


def cut_tensors(folder: Path) -> None:
    path = folder / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])


def lose_tensors(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def lose_values(folder: Path) -> None:
    (folder / "training.pt").unlink()


def lose_table(folder: Path) -> None:
    (folder / ".metadata").unlink()


def cut_about(folder: Path) -> None:
    path = folder / "about.json"
    path.write_bytes(path.read_bytes()[:200])


def empty_about(folder: Path) -> None:
    (folder / "about.json").write_bytes(b"")


def list_about(folder: Path) -> None:
    (folder / "about.json").write_text("[1, 2]")


def binary_about(folder: Path) -> None:
    (folder / "about.json").write_bytes(bytes(range(128, 256)))


def deep_about(folder: Path) -> None:
    (folder / "about.json").write_text("[" * 100_000)


def wrong(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        change_about(folder, **changes)

    change.__name__ = repr(changes)
    return change


SIZES = [cut_tensors, lose_tensors, lose_values, lose_table]
ABOUTS = [cut_about, empty_about, list_about, binary_about, deep_about]
TYPES = [
    wrong(step="6"),
    wrong(step=-1),
    wrong(step=None),
    wrong(metrics=[0.5]),
    wrong(metrics={"top1": "high"}),
    wrong(best_by=["top1"]),
    wrong(files=[1]),
    wrong(files={"training.pt": 3}),
    wrong(files={"../training.pt": [3, 4]}),
    wrong(settings=3),
    wrong(aliases=3),
    wrong(updates_per_epoch="x"),
]


@pytest.mark.parametrize("spoil", [*SIZES, *ABOUTS, *TYPES], ids=lambda spoil: spoil.__name__)
def test_a_damaged_checkpoint_is_named_and_the_last_good_one_offered(
    run_folder: Path, spoil: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the run or the checkpoint is named: status 2, one line, and what to go on from."""
    spoil(step(run_folder, 6))
    for place in ((), (step(run_folder, 6),)):
        line = refused(capsys, *DIGITS, "--out", run_folder, "--resume", *place)
        assert str(step(run_folder, 6)) in line
        assert f"--resume {step(run_folder, 4)}" in line


@pytest.mark.parametrize("spoil", [cut_tensors, cut_about], ids=lambda spoil: spoil.__name__)
def test_where_all_are_damaged_nothing_is_offered(
    run_folder: Path, spoil: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (2, 4, 6):
        spoil(step(run_folder, number))
    for place in ((), (step(run_folder, 6),), (run_folder,)):
        line = refused(capsys, *DIGITS, "--out", run_folder, "--resume", *place)
        assert "--resume" not in line
        assert str(run_folder) in line


@pytest.mark.parametrize(
    ("place", "said"), [(".", "no whole checkpoint there"), ("./", "no whole checkpoint there"), ("", "is no folder")]
)
def test_the_folder_where_we_are_is_a_place_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str, said: str
) -> None:
    """It is not the --resume without a place, which may begin anew."""
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, *DIGITS, "--out", tmp_path / "run", "--resume", place)
    assert said in line
    assert not (tmp_path / "run").exists()


def test_the_one_that_is_offered_is_whole(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint whose bytes differ, with its size as it was, is not offered."""
    cut_tensors(step(run_folder, 6))
    flip(step(run_folder, 4) / "__0_0.distcp")
    line = refused(capsys, *DIGITS, "--out", run_folder, "--resume")
    assert f"--resume {step(run_folder, 2)}" in line


def test_inspect_says_which_are_damaged(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1, and every checkpoint has its row."""
    assert main(["checkpoint", "inspect", str(run_folder)]) == 0
    assert "DAMAGED" not in capsys.readouterr().out
    flip(step(run_folder, 4) / "__0_0.distcp")
    assert main(["checkpoint", "inspect", str(run_folder)]) == 1
    printed = capsys.readouterr().out
    assert printed.count("DAMAGED") == 1
    assert printed.count("step-0000000") == 3


def places(folder: Path) -> dict[str, Path]:
    """What is no run of ours."""
    (folder / "empty").mkdir()
    (folder / "file").write_text("no folder")
    (folder / "weights.pt").write_bytes(b"no folder either")
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=folder / "foreign", no_dist=True)
    return {name: folder / name for name in ("empty", "file", "weights.pt", "foreign", "missing", "missing/step-3")}


def test_what_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A foreign checkpoint, a file, an empty folder, nothing at all: status 2, one line; nothing is left behind."""
    for name, place in places(tmp_path).items():
        line = refused(capsys, *DIGITS, "--out", tmp_path / "out", "--resume", place)
        assert str(place) in line, name
        line = refused(capsys, "predict", "digits", "--resume", place, "--out", tmp_path / "p.npy")
        assert str(place) in line, name
        for kind in (["inspect", place], ["export", place, tmp_path / "w.pt"]):
            assert str(place) in refused(capsys, "checkpoint", *kind), name
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "p.npy").exists()
    assert not (tmp_path / "w.pt").exists()
    assert "another program" in refused(capsys, *DIGITS, "--resume", tmp_path / "foreign")


def flip(path: Path) -> None:
    """One bit of one byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def try_digits(world: World, layout: str, place: Path) -> str:
    """What going on from there comes to; '' where it does."""
    workload = load(find_workload("digits", width=4))
    prepared = prepare(workload, parse_layout(layout), world)
    checkpoint = checkpoint_named(place)
    try:
        resume(prepared, world, checkpoint, checkpoint.about)
    except UsageError as error:
        return str(error)
    return ""


def test_one_flipped_bit_is_found_in_any_file(ranks: Any, run_folder: Path) -> None:
    """By every rank alike, whichever read that file; and the last good one is offered."""
    place = step(run_folder, 6)
    assert ranks(2, try_digits, "ddp", place) == ["", ""]
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp", "training.pt"):
        flip(place / name)
        one, other = ranks(2, try_digits, "ddp", place)
        assert one == other
        assert "\n" not in one
        assert f"{name} is not what was saved" in one
        assert f"--resume {step(run_folder, 4)}" in one
        flip(place / name)


def test_one_flipped_bit_on_the_command_line(everyrank: Any, run_folder: Path, tmp_path: Path) -> None:
    flip(step(run_folder, 6) / "__1_0.distcp")
    words = ("--layout", "ddp", "--processes", "2", "--out", run_folder, "--resume")
    done = everyrank(tmp_path, *DIGITS, *words)
    assert done.returncode == 2, done.stderr
    line = one_line(done.stderr)
    assert "__1_0.distcp" in line
    assert f"--resume {step(run_folder, 4)}" in line


class Hostile:
    """A pickle that calls a function when it is opened."""

    def __init__(self, *what: Any) -> None:
        self.what = what

    def __reduce__(self) -> Any:
        return self.what[0], self.what[1:]


def hostile_tables(folder: Path, mark: Path) -> dict[str, bytes]:
    """Tables of contents that run something, or would make the reader do so."""
    table = pickle.loads((folder / ".metadata").read_bytes())
    bytes_entry = copy.deepcopy(table)
    name = next(iter(table.state_dict_metadata))
    bytes_entry.state_dict_metadata[name] = dcp.metadata.BytesStorageMetadata()
    outside = copy.deepcopy(table)
    for info in outside.storage_data.values():
        info.relative_path = f"../{folder.name}/{info.relative_path}"
    planned = copy.deepcopy(table)
    planned.planner_data = Hostile(os.system, f"touch {mark}")
    return {
        "a call": pickle.dumps(Hostile(os.system, f"touch {mark}")),
        "a call within": pickle.dumps(planned),
        "eval": pickle.dumps(Hostile(eval, f"open({str(mark)!r}, 'w')")),
        "getattr": pickle.dumps(Hostile(getattr, "a", "upper")),
        "a file": pickle.dumps(Hostile(open, str(mark), "w")),
        "another object": pickle.dumps({"weight": 3}),
        "bytes": pickle.dumps(bytes_entry),
        "outside": pickle.dumps(outside),
        "cut off": (folder / ".metadata").read_bytes()[:-20],
        "nothing": b"",
    }


def test_a_hostile_table_runs_nothing(ranks: Any, run_folder: Path, tmp_path: Path) -> None:
    """Its size and sum are right; going on and exporting end with one line, and nothing of it happens."""
    place, mark = step(run_folder, 6), tmp_path / "it-ran"
    for name, content in hostile_tables(place, mark).items():
        (place / ".metadata").write_bytes(content)
        sum_again(place, ".metadata")
        for line in ranks(2, try_digits, "ddp", place):
            assert line, name
            assert "\n" not in line, name
            assert str(place) in line, name
        with pytest.raises(UsageError) as caught:
            export(checkpoint_named(place), tmp_path / "w.pt")
        assert "\n" not in str(caught.value), name
        assert not mark.exists(), name
        assert not (tmp_path / "w.pt").exists(), name


def hostile_values(mark: Path) -> dict[str, Any]:
    call = Hostile(os.system, f"touch {mark}")
    return {
        "a call": call,
        "within": {"groups": [{"lr": call}], "schedule": None, "scale": None},
        "within a list": [call],
    }


@pytest.mark.parametrize("zipped", [True, False])
def test_hostile_values_run_nothing(ranks: Any, run_folder: Path, tmp_path: Path, zipped: bool) -> None:
    """training.pt with right size and sum: one line, and nothing of it happens."""
    place, mark = step(run_folder, 6), tmp_path / "it-ran"
    for name, values in hostile_values(mark).items():
        torch.save(values, place / "training.pt", _use_new_zipfile_serialization=zipped)
        sum_again(place, "training.pt")
        for line in ranks(2, try_digits, "ddp", place):
            assert line, name
            assert "\n" not in line, name
            assert "training.pt" in line, name
        assert not mark.exists(), name
    (place / "training.pt").write_bytes(pickle.dumps(Hostile(os.system, f"touch {mark}")))
    sum_again(place, "training.pt")
    assert all("training.pt" in line for line in ranks(2, try_digits, "ddp", place))
    assert not mark.exists()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"groups": 3, "schedule": None, "scale": None},
        {"groups": [3], "schedule": None, "scale": None},
        torch.ones(3),
    ],
    ids=["nothing", "no groups", "no group", "a tensor"],
)
def test_values_of_another_kind_are_refused(ranks: Any, run_folder: Path, values: Any) -> None:
    """Something else under the name of training.pt, size and sum being right: one line that names it."""
    place = step(run_folder, 6)
    torch.save(values, place / "training.pt")
    sum_again(place, "training.pt")
    (line,) = ranks(1, try_digits, "single", place)
    assert "training.pt" in line
    assert "\n" not in line


def test_a_hostile_table_on_the_command_line(everyrank: Any, run_folder: Path, tmp_path: Path) -> None:
    place, mark = step(run_folder, 6), tmp_path / "it-ran"
    (place / ".metadata").write_bytes(pickle.dumps(Hostile(os.system, f"touch {mark}")))
    sum_again(place, ".metadata")
    done = everyrank(tmp_path, *DIGITS, "--layout", "ddp", "--processes", "2", "--resume", place)
    assert done.returncode == 2, done.stderr
    assert ".metadata" in one_line(done.stderr)
    assert not mark.exists()
    assert not list(tmp_path.glob("runs/*/log.jsonl"))


def try_other(world: World, place: Path, changes: dict[str, Any]) -> str:
    """Going on with a training that is another one."""
    going = Going(world, dataclasses.replace(training(), **changes), "single:precision=float64")
    try:
        resume(going.prepared, world, checkpoint_named(place), going.about())
    except UsageError as error:
        return str(error)
    return ""


class Wider(Mixed):
    """Another model."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 2, bias=False)


class Other(Mixed):
    """The same names, another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(1, 2))


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    return torch.optim.SGD([{"params": [first]}, {"params": others}], lr=0.05, momentum=0.9)


def test_another_training_is_refused(ranks: Any, tmp_path: Path) -> None:
    """In one line that names what differs; the model is not touched by half."""
    ranks(1, begins, "single", "sgd", tmp_path)
    place = find_checkpoint(tmp_path).path
    expected: list[tuple[dict[str, Any], str]] = [
        ({"seed": 1}, "seed"),
        ({"global_batch": 8}, "global_batch"),
        ({"clip_norm": 0.25}, "clip_norm"),
        ({"name": "another"}, "workload"),
        ({"train_data": lambda: zoo.Augmented(24)}, "samples"),
        ({"model": Wider}, "head.bias"),
        ({"model": Other}, "offset"),
        ({"optimizer": two_groups}, "groups"),
        ({"schedule": None}, "SGD and NoneType"),
        ({"optimizer": lambda model: torch.optim.Adagrad(model.parameters())}, "Adagrad"),
    ]
    for changes, word in expected:
        (line,) = ranks(1, try_other, place, changes)
        assert word in line, changes
        assert "\n" not in line


# --- G: a full disk, for real

FULL = """\
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from everyrank import Workload

calls = 0
BALLAST = Path(os.environ["DISK"]) / "ballast"


def train_data():
    return TensorDataset(torch.linspace(0, 1, 48).reshape(16, 3), torch.linspace(1, 0, 32).reshape(16, 2))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4000), nn.Linear(4000, 2))


def loss(output, target):
    global calls
    calls += 1
    if calls == 5 and torch.distributed.get_rank() == 0:
        while not (BALLAST.parent / "run" / "checkpoints" / "step-00000004").exists():
            time.sleep(0.01)  # rank 0 may still be writing it
        free = os.statvfs(BALLAST.parent)
        BALLAST.write_bytes(bytes(free.f_bavail * free.f_frsize - int(os.environ["LEFT"])))
    if calls == 9 and torch.distributed.get_rank() == 0 and os.environ["CLEARED"] == "1":
        BALLAST.unlink()
    return ((output - target) ** 2).sum(), target.numel()


workload = Workload(
    name="mine",
    model=model,
    train_data=train_data,
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9),
    global_batch=4,
    steps=12,
)
"""


@pytest.fixture(scope="module")
def small_disks(forkserver: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where no small disk can be made."""
    reason = "a disk that is full is not verified for real"
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip(f"{reason}: needs Linux, root and mount")
    folder = tmp_path_factory.mktemp("disk")
    with (folder / "said").open("w") as said:
        if forkserver.start(mount_small_disk, folder, streams=(None, said, said)).wait(60):
            pytest.skip(f"{reason}: {(folder / 'said').read_text().splitlines()[-1]}")


def mount_small_disk(disk: Path) -> None:
    """8 MiB, in a mount namespace of this process and its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000):  # CLONE_NEWNS; os.unshare comes with Python 3.12
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], check=True)


def train_on_small_disk(disk: Path, kept: Path, words: list[str]) -> None:
    """What is on the disk in the end is copied to `kept`, where everybody sees it."""
    mount_small_disk(disk)
    try:
        run_python(["-m", "everyrank", "train", "mine.py", "--out", str(disk / "run"), "--save-every", "2", *words])
    finally:
        (disk / "ballast").unlink(missing_ok=True)
        shutil.copytree(disk / "run", kept, symlinks=True)


@dataclasses.dataclass
class Ended:
    """How it ended, and what was said."""

    returncode: int
    stdout: str
    stderr: str


def on_a_full_disk(forkserver: ForkServer, folder: Path, *words: str, cleared: bool, left: int) -> Ended:
    """Train with the run on a disk of 8 MiB that is full from update 5 on."""
    (folder / "mine.py").write_text(FULL)
    (folder / "disk").mkdir()
    own = {"DISK": str(folder / "disk"), "LEFT": str(left), "CLEARED": str(int(cleared)), "OMP_NUM_THREADS": "1"}
    arguments = (folder / "disk", folder / "kept", list(words))
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        started = forkserver.start(
            train_on_small_disk,
            *arguments,
            folder=folder,
            environment={**os.environ, **own},
            streams=(None, out, err),
        )
    return Ended(started.wait(200), (folder / "out").read_text(), (folder / "err").read_text())


def steps_logged(run: Path) -> list[int]:
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "step" in row]


def test_a_full_disk_while_training(forkserver: ForkServer, small_disks: None, tmp_path: Path) -> None:
    """One clear line for each checkpoint that could not be saved; the training goes on, and saves when it can."""
    done = on_a_full_disk(forkserver, tmp_path, "--keep", "9", cleared=True, left=60_000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = [line for line in done.stdout.splitlines() if "could not be saved" in line]
    assert len(lines) == 2, done.stdout  # after the updates 6 and 8
    for line in lines:
        assert "No space left on device" in line
        assert "step-00000004" in line
        assert "the training goes on" in line
    there = checkpoints_of(tmp_path / "kept")
    assert [one.about.step for one in there] == [2, 4, 10, 12]
    assert [damage(one) for one in there] == [None] * 4
    assert steps_logged(tmp_path / "kept") == list(range(12))
    assert not list((tmp_path / "kept" / "checkpoints").glob("*.tmp"))


def test_a_full_disk_at_the_end(forkserver: ForkServer, everyrank: Any, small_disks: None, tmp_path: Path) -> None:
    """The last checkpoint is what the run was for: status 4, one line; the one before is whole and goes on."""
    two = ("--layout", "ddp", "--processes", "2")
    done = on_a_full_disk(forkserver, tmp_path, *two, cleared=False, left=60_000)
    assert done.returncode == 4, done.stdout + done.stderr
    line = one_line(done.stderr)
    assert "No space left on device" in line
    assert "step-00000004" in line
    there = checkpoints_of(tmp_path / "kept")
    assert [one.about.step for one in there] == [2, 4]
    assert [damage(one) for one in there] == [None] * 2
    words = ("--out", "kept", "--resume", "--steps", "8", "--save-every", "2")
    again = everyrank(tmp_path, "train", "mine.py", *two, *words, DISK=str(tmp_path), LEFT="0", CLEARED="0")
    assert again.returncode == 0, again.stderr
    assert steps_logged(tmp_path / "kept") == list(range(8))
    assert find_checkpoint(tmp_path / "kept").about.step == 8


def test_a_disk_with_no_room_for_the_log_either(forkserver: ForkServer, small_disks: None, tmp_path: Path) -> None:
    """Not one byte is left: however it ends, in one line, and what was saved is whole."""
    done = on_a_full_disk(forkserver, tmp_path, cleared=False, left=0)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "No space left on device" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    there = checkpoints_of(tmp_path / "kept")
    assert [one.about.step for one in there] == [2, 4]
    assert [damage(one) for one in there] == [None] * 2


# --- D: layouts that split the model


def decoding(optimizer: str) -> Workload:
    """A tied decoder that every layout can split; 4 blocks, two of them a stage or one."""
    return zoo.workload("decoder", optimizer, schedule=schedule)


def in_float64(layout: str) -> str:
    return f"{layout}{',' if ':' in layout else ':'}precision=float64"


def decodes(
    world: World, layout: str, optimizer: str, run: Path, saves: bool
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train, and save in the middle; or go on from there. The shares after that, and the model at the end."""
    going = Going(world, decoding(optimizer), in_float64(layout))
    if saves:
        going.updates(0, SAVED)
        going.saver(run).save(SAVED, {})
        begun = SAVED
    else:
        going.updates(0, 2)  # a model that is not fresh at all: everything has to be put back
        begun = resume(going.prepared, world, find_checkpoint(run), going.about())
    return going.updates(begun, END), going.prepared.state()


@pytest.fixture(scope="session")
def decoded() -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    return {}


SPLIT = [
    (("fsdp:tensor=2", 4), [("pipeline:shard=2", 4), ("ddp", 2), ("single", 1)]),
    (("pipeline:schedule=interleaved", 2), [("ddp", 2), ("tensor", 2), ("pipeline:schedule=zero-bubble", 4)]),
    (("context", 2), [("fsdp:tensor=2", 4), ("pipeline:tensor=2", 4)]),
    (("pipeline:shard=2", 4), [("fsdp:replicate=2", 4), ("fsdp:context=2", 2)]),
    (("single", 1), [("pipeline:tensor=2,schedule=gpipe", 4), ("fsdp:tensor=2,sequence=true", 4)]),
]


@pytest.mark.parametrize("optimizer", ["adamw"])
@pytest.mark.parametrize(("saved", "then"), SPLIT, ids=[saved[0] for saved, _ in SPLIT])
def test_a_split_model_goes_on_in_other_parts(
    ranks: Any,
    tmp_path: Path,
    decoded: dict[str, Any],
    optimizer: str,
    saved: tuple[str, int],
    then: list[tuple[str, int]],
) -> None:
    """Matrices, stages, shards and the optimizer's state of them: losses are those of one device that never stopped."""
    if optimizer not in decoded:
        whole = ranks(1, decodes, "single", optimizer, tmp_path / "whole", True)
        decoded[optimizer] = losses_of(whole), whole[0][1]
    losses, state = decoded[optimizer]
    for saves, (layout, size) in [(True, saved), *((False, other) for other in then)]:
        rows = ranks(size, decodes, layout, optimizer, tmp_path / "run", saves)
        assert losses_of(rows) == pytest.approx(losses, rel=1e-10, abs=0.0), (layout, size)
        same(rows[0][1], state, relative=1e-9)
        assert not any(row[1] for row in rows[1:]), "the state is on rank 0 alone"


def saves_and_goes_on(world: World, layout: str, run: Path) -> Any:
    return interrupted(world, in_float64(layout), decoding("adamw"), 0, run)


@pytest.mark.parametrize("layout", ["tensor", "context", "pipeline:schedule=interleaved"])
def test_a_split_model_goes_on_to_the_last_bit(ranks: Any, tmp_path: Path, layout: str) -> None:
    """In the same layout nothing is lost: all that a rank has, optimizer and schedule included."""
    for row in ranks(2, saves_and_goes_on, layout, tmp_path):
        assert row["begun"] == SAVED
        (then, values_then), (now, values_now) = row["at_save"]
        same(then, now)
        assert values_then == values_now
        for one, other in zip(row["whole"][0], row["again"][0], strict=True):
            assert torch.equal(one, other)
        same(row["whole"][1], row["again"][1])


def saves_from_afar(world: World, layout: str, run: Path) -> bool:
    """One checkpoint written at once, and one in the background as from a device that is not the CPU."""
    going = Going(world, decoding("adamw"), in_float64(layout))
    going.updates(0, 3)
    going.saver(run / "at once").save(3, {})
    on_cpu = everyrank.checkpoint.saver._on_cpu
    everyrank.checkpoint.saver._on_cpu = everyrank.checkpoint.saver._twin_on_cpu
    try:
        saver = going.saver(run / "later", in_background=True)
        saver.save(3, {})
        saver.finish()
    finally:
        everyrank.checkpoint.saver._on_cpu = on_cpu
    return any(isinstance(tensor, DTensor) for tensor in tensors_of(going.prepared.trainable, world).values())


@pytest.mark.parametrize("layout", ["fsdp:tensor=2", "pipeline:shard=2"])
def test_in_the_background_parts_of_a_mesh_stay_where_they_are(ranks: Any, tmp_path: Path, layout: str) -> None:
    """A part of the mesh is not its first ranks: on a GPU the copies were put together wrongly."""
    assert any(ranks(4, saves_from_afar, layout, tmp_path))
    (tensors, values), (later, values_later) = (
        everything_in(find_checkpoint(tmp_path / name)) for name in ("at once", "later")
    )
    same(tensors, later)
    assert values == values_later
