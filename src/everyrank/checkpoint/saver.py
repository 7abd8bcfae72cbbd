"""When and how a training is saved, and how one goes on.

A checkpoint is written into a folder whose name says unfinished and gets its own name when every rank's part, and the
sum of each file, are on the disk. Until then the one before is the newest.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from everyrank.checkpoint.contents import put_back, targets_for, tensors_of, values_of
from everyrank.checkpoint.storage import (
    SaveError,
    contents_of,
    group_for_saving,
    read,
    read_values,
    write,
    write_values,
)
from everyrank.collectives import gather
from everyrank.errors import EveryrankError, UsageError
from everyrank.runs import (
    About,
    Checkpoint,
    checkpoints_of,
    clear_unfinished,
    commit,
    damage,
    last_good,
    mark_best,
    new_folder,
    prune,
    write_about,
)
from everyrank.strategies import Prepared
from everyrank.world import World, on_rank_0

__all__ = ["Saver", "load_model", "resume"]


class Saver:
    """Saves a training into the folder of its run. Every method is a collective, except `about`'s fields.

    run        the folder of the run
    about      what all its checkpoints say of themselves; step, metrics and files are filled in
    keep       how many of the last checkpoints stay, beside the best
    in_background   copy the state, and write the copy while the training goes on
    """

    def __init__(
        self, run: Path, prepared: Prepared, world: World, about: About, keep: int, in_background: bool
    ) -> None:
        self.run, self.prepared, self.world, self.about, self.keep = run, prepared, world, about, keep
        # a layout of one process has nothing to agree on with others
        self.group = group_for_saving(world) if prepared.reads.count > 1 else None
        self.thread = ThreadPoolExecutor(1, "everyrank-save") if in_background else None
        self.waiting: Future[Path | None] | None = None
        self.stalls: list[float] = []
        self.last_saved: int | None = None
        if world.rank == 0:
            clear_unfinished(run)  # of a crash

    def save(self, step: int, metrics: dict[str, float]) -> None:
        """Save the training after `step` updates. Raises `SaveError` where that failed; the one before stays.

        In the background, a failure is raised by the next call.
        """
        start = time.perf_counter()
        failure: SaveError | None = None
        try:
            self.finish()
        except SaveError as error:
            failure = error  # of the one before; this one is tried all the same
        try:
            about = dataclasses.replace(self.about, step=step, metrics=metrics)
            tensors, values = tensors_of(self.prepared, self.world), values_of(self.prepared)
            if self.thread is None:
                self._write(tensors, values, about)
            else:
                copies = {name: _copied(tensor) for name, tensor in tensors.items()}
                if self.world.device.type == "cuda":
                    torch.cuda.synchronize(self.world.device)
                self.waiting = self.thread.submit(self._write, copies, values, about)
            self.last_saved = step
        finally:
            self.stalls.append(time.perf_counter() - start)
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """Wait for what is still being written. Raises `SaveError` where it failed."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting.result()

    def newest(self) -> Path | None:
        """The newest whole checkpoint of the run."""
        there = checkpoints_of(self.run)
        return there[-1].path if there else None

    def _write(self, tensors: dict[str, Tensor], values: dict[str, Any], about: About) -> Path | None:
        folder = new_folder(self.run, about.step)
        try:
            if self.world.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            files = write(tensors, folder, self.world.rank, self.group)
            if self.world.rank != 0:
                return None
            files |= write_values(values, folder)
            write_about(folder, dataclasses.replace(about, files=files))
            final = commit(folder)
            mark_best(self.run)
            prune(self.run, self.keep, about.step)
        except OSError as error:
            self._discard(folder)
            raise SaveError(f"{error.filename or folder}: {error.strerror}") from error
        except EveryrankError:
            self._discard(folder)
            raise
        return final

    def _discard(self, folder: Path) -> None:
        """Give the room back: on a full disk the next attempt needs it."""
        if self.world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _copied(tensor: Tensor) -> Tensor:
    """A copy on CPU that training does not change."""
    if isinstance(tensor, DTensor):
        local = tensor.to_local().to("cpu", copy=True)
        return DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return tensor.to("cpu", copy=True, non_blocking=True)


def resume(prepared: Prepared, world: World, checkpoint: Checkpoint, expected: About) -> int:
    """Put a training where a checkpoint left it, under any layout; the number of updates done. A collective.

    `expected` is what a checkpoint of this training would say of itself.
    Raises `UsageError` on every rank alike: for a damaged checkpoint (the last good one is offered), and for one of
    another training.
    """
    on_rank_0(world, "resume", lambda: _check_same_training(checkpoint, expected))
    _check_whole(checkpoint, prepared, world)
    kept = contents_of(checkpoint)
    tensors = targets_for(prepared, world, kept)
    group = group_for_saving(world) if prepared.reads.count > 1 else None
    read(tensors, checkpoint, group)
    try:
        put_back(prepared, world, tensors, read_values(checkpoint))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{checkpoint.path}: training.pt does not hold what this training needs ({type(error).__name__}: {error})"
        ) from error
    return checkpoint.about.step


def load_model(prepared: Prepared, world: World, checkpoint: Checkpoint) -> None:
    """Put the model alone where a checkpoint left it, whatever else changed since. Raises as `resume` does."""
    _check_whole(checkpoint, prepared, world)
    kept = contents_of(checkpoint)
    tensors = {name: tensor for name, tensor in targets_for(prepared, world, kept).items() if name.startswith("model/")}
    read(tensors, checkpoint, group_for_saving(world) if prepared.reads.count > 1 else None)


def _check_same_training(checkpoint: Checkpoint, expected: About) -> None:
    saved = checkpoint.about
    for name in ("workload", "seed", "global_batch", "clip_norm", "samples", "data_checksum"):
        was, now = getattr(saved, name), getattr(expected, name)
        if was != now:
            raise UsageError(
                f"{checkpoint.path}: it was trained with {name}={was}, this is {name}={now}: another training; "
                "make them equal, or begin from its weights: everyrank checkpoint export, then --pretrained"
            )
    was, now = dict(saved.settings), dict(expected.settings)
    for name in sorted((was.keys() | now.keys()) - {"data"}):  # data may have been moved; its checksum was compared
        if was.get(name) != now.get(name):
            raise UsageError(
                f"{checkpoint.path}: it was trained with {_setting(name, was)}, this is {_setting(name, now)}: "
                "another training; make them equal"
            )


def _setting(name: str, settings: dict[str, Any]) -> str:
    return f"--set {name}={settings[name]}" if name in settings else f"no --set {name}"


def _check_whole(checkpoint: Checkpoint, prepared: Prepared, world: World) -> None:
    """Read all files once, each by one rank, and compare their sums."""
    names = sorted(checkpoint.about.files)[prepared.reads.index :: prepared.reads.count]
    found = damage(checkpoint, names) or ""
    if prepared.reads.count > 1:
        rows = gather(torch.tensor(list(found.encode()), dtype=torch.uint8), world)
        found = next((text for row in rows if (text := bytes(row.tolist()).decode())), "")
    if found:
        good = last_good(checkpoint.path)
        offer = f"the last good one: --resume {good.path}" if good else "no other checkpoint of this run is whole"
        raise UsageError(f"{checkpoint.path}: damaged: {found}; {offer}")
