"""What the tests of checkpoints share: a training that has everything that could be forgotten, update by update."""

from __future__ import annotations

import copy
import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LinearLR, LRScheduler, MultiStepLR, SequentialLR

import zoo
from everyrank import Workload, parse_layout
from everyrank.checkpoint import Saver, aliases_of, resume
from everyrank.checkpoint.contents import tensors_of, values_of
from everyrank.checkpoint.storage import contents_of, read, read_values
from everyrank.data import all_updates, updates_per_epoch
from everyrank.errors import UsageError
from everyrank.loop import run_updates
from everyrank.runs import Checkpoint, CheckpointMetadata, checkpoint_named, find_checkpoint
from everyrank.runs.metadata import with_sum
from everyrank.strategies import Prepared, prepare
from everyrank.workload import find_workload, load
from everyrank.world import World


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

    def about(self, best_by: str = "eval_loss") -> CheckpointMetadata:
        workload, per_epoch = self.workload, updates_per_epoch(len(self.data), self.workload.global_batch)
        where = {"layout": str(self.layout), "world_size": self.world.size}
        what = {"workload": workload.name, "settings": {}, "seed": workload.seed, "samples": len(self.data)}
        how = {"global_batch": workload.global_batch, "clip_norm": workload.clip_norm, "data_checksum": None}
        more = {"updates_per_epoch": per_epoch, "best_by": best_by, "versions": {}, "time": ""}
        return CheckpointMetadata(step=0, aliases=aliases_of(self.prepared.model), **where, **what, **how, **more)

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


def begins(world: World, layout: str, optimizer: str, run: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """A whole training that saves in the middle: the shares after that, and the model at the end."""
    going = Going(world, training(optimizer), f"{layout}:precision=float64")
    going.updates(0, SAVED)
    going.saver(run).save(SAVED, {})
    return going.updates(SAVED, END), going.prepared.full_state()


def losses_of(rows: list[tuple[list[Tensor], Any]]) -> list[float]:
    """The losses of all ranks together."""
    totals = [torch.stack(shares).sum(0) for shares in zip(*(row[0] for row in rows), strict=True)]
    return [float(total[0] / total[1]) for total in totals]


def saves(world: World, run: Path, name: str, scores: list[float | None], keep: int, first: int = 1) -> list[str]:
    """Save with one score after another; the names that are in the folder in the end."""
    going = Going(world, zoo.workload("frozen"), "single")
    saver = going.saver(run, keep=keep, best_by=name)
    for step, score in enumerate(scores, first):
        saver.save(step, {} if score is None else {name.partition(":")[0]: score})
    return sorted(path.name for path in (run / "checkpoints").iterdir())


DIGITS = ("train", "digits", "--set", "width=4", "--steps", "6", "--device", "cpu")


def step(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step-{number:08d}"


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


def try_digits(world: World, layout: str, place: Path) -> str:
    """What going on from there comes to; '' where it does."""
    workload = load(find_workload("digits", width=4))
    prepared = prepare(workload, parse_layout(layout), world)
    checkpoint = checkpoint_named(place)
    try:
        resume(prepared, world, checkpoint, checkpoint.metadata)
    except UsageError as error:
        return str(error)
    return ""
