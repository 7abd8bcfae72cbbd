"""Saver: saves checkpoints atomically, optionally in the background. `resume` loads one under any layout.

A checkpoint is written into a folder with an unfinished name. It gets its final name when the files of every rank and
their checksums are on disk. Until then the previous checkpoint is the newest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from everyrank.checkpoint.contents import load_copies, load_state, targets_for, tensors_of, values_of
from everyrank.checkpoint.storage import (
    SaveError,
    check_values,
    contents_of,
    group_for_saving,
    read,
    read_values,
    text_of_rank_0,
    write,
    write_values,
)
from everyrank.errors import EveryrankError, UsageError, WorkloadError
from everyrank.parallel.mesh import local_tensor
from everyrank.runs import (
    LENGTHS,
    Checkpoint,
    CheckpointMetadata,
    add_metrics,
    changed_lengths,
    check_metadata,
    checkpoints_of,
    clear_unfinished,
    commit,
    damage,
    discard,
    json_form,
    mark_best,
    new_folder,
    refuse_damaged,
    remove_old_checkpoints,
    write_metadata,
)
from everyrank.strategies import Prepared
from everyrank.world import World, on_rank_0
from everyrank.world.collectives import all_gather, all_gather_json

__all__ = ["Saver", "copies_on_cpu", "load_model", "resume"]


class Saver:
    """Saves a training into the folder of its run. Every method is a collective, except the fields of `metadata`.

    run        the folder of the run
    metadata   CheckpointMetadata of all its checkpoints; step, metrics and files are filled in
    keep       number of last checkpoints to keep, in addition to the best
    in_background   copy the state and write the copy while the training continues; one at a time in a world
    """

    def __init__(
        self, run: Path, prepared: Prepared, world: World, metadata: CheckpointMetadata, keep: int, in_background: bool
    ) -> None:
        self.run, self.prepared, self.world, self.metadata, self.keep = run, prepared, world, metadata, keep
        self.group = group_for_saving(prepared, world, in_background)
        self.writers = Writers(self.group)
        self.thread = ThreadPoolExecutor(1, "everyrank-save") if in_background else None
        self.waiting: Future[None] | None = None
        self.stalls: list[float] = []
        self.last_saved: int | None = None
        check_values(values_of(prepared.trainable))  # fail now rather than after an epoch
        tensors_of(prepared.trainable, world)
        _check_settings(metadata.settings)
        try:
            check_metadata(metadata)
        except (TypeError, ValueError, OverflowError) as error:
            raise WorkloadError(f"the metadata of this training's checkpoints is invalid: {error}") from error
        if world.rank == 0:
            clear_unfinished(run)  # left by a crash

    def save(self, step: int, metrics: dict[str, float]) -> SaveError | None:
        """Save the training after `step` updates. Returns the error of the previous save in the background, if any.

        Raises `SaveError` on every rank if this one could not be saved; the previous checkpoint stays.
        """
        start = time.perf_counter()
        earlier_error: SaveError | None = None
        try:
            self.finish()
        except SaveError as error:
            earlier_error = error
        try:
            metadata = dataclasses.replace(self.metadata, step=step, metrics=metrics)
            trainable = self.prepared.trainable
            self.prepared.gather_for_eval()
            tensors, values = tensors_of(trainable, self.world), values_of(trainable)
            if self.thread is None:
                self._write(tensors, values, metadata)
            else:
                copies = copies_on_cpu(self.writers.own_of(tensors))
                self.waiting = self.thread.submit(self._write, copies, values, metadata)
            self.last_saved = step
        finally:
            self.stalls.append(time.perf_counter() - start)
        return earlier_error

    def score(self, step: int, metrics: dict[str, float]) -> None:
        """Add metrics to the checkpoint of this step, which is saved or being saved. Rank 0 writes them."""
        if self.world.rank != 0:
            return
        if self.thread is None:
            self._score(step, metrics, None)
        else:
            self.waiting = self.thread.submit(self._score, step, metrics, self.waiting)

    def _score(self, step: int, metrics: dict[str, float], saving: Future[None] | None) -> None:
        if saving is not None:
            saving.result()  # already done, because the thread runs one task after the other
        with contextlib.suppress(OSError, UsageError):  # the checkpoint is complete without metrics
            add_metrics(self.run, step, metrics)
            mark_best(self.run, self.metadata.best_by)
            remove_old_checkpoints(self.run, self.keep, step, self.metadata.best_by)

    def finish(self) -> None:
        """Wait for a save in the background. Raises `SaveError` on every rank if it failed."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            try:
                waiting.result()
            except SaveError:
                self.last_saved = None
                raise

    def finish_or_report(self) -> None:
        """Wait for a save in the background. Raises `EveryrankError` that names the newest checkpoint if it failed."""
        try:
            self.finish()
        except SaveError as error:
            raise EveryrankError(self.why_not_saved(error)) from error

    def why_not_saved(self, error: SaveError) -> str:
        """Return the message of a failure, with the newest complete checkpoint."""
        checkpoints = checkpoints_of(self.run)
        remaining = (
            f"the previous one is complete: {checkpoints[-1].path}" if checkpoints else "there is no earlier one"
        )
        return f"a checkpoint could not be saved: {error}; {remaining}"

    def _write(self, tensors: dict[str, Tensor], values: dict[str, Any], metadata: CheckpointMetadata) -> None:
        """Write a checkpoint on all ranks. Raises `SaveError` on every rank if one failed."""
        folder = new_folder(self.run, metadata.step)
        failure = ""
        try:
            if self.world.rank == 0:
                discard(folder)
            text_of_rank_0("", self.group)  # rank 0 removes an old folder before any rank creates the new one
            files = write(tensors, folder, self.world.rank, self.group)
            if self.world.rank == 0:
                failure = self._commit(folder, files, values, metadata)
        except SaveError:  # raised on every rank
            self._discard(folder)
            raise
        failure = text_of_rank_0(failure, self.group)
        if failure:
            self._discard(folder)
            raise SaveError(failure)

    def _commit(
        self, folder: Path, files: dict[str, tuple[int, int]], values: dict[str, Any], metadata: CheckpointMetadata
    ) -> str:
        """Complete a checkpoint on rank 0 when all ranks have written. Returns an error message, or ""."""
        try:
            missing_files = [name for name in files if not (folder / name).exists()]
            if missing_files:
                return f"{folder}: {missing_files[0]} is missing; all hosts have to share the folder of the run"
            files |= write_values(values, folder)
            write_metadata(folder, dataclasses.replace(metadata, files=files))
            commit(folder)
        except OSError as error:
            return f"{error.filename or folder}: {error.strerror}"
        except WorkloadError as error:  # a value of a later update; the other ranks wait for the result
            return str(error)
        with contextlib.suppress(OSError):  # the checkpoint is complete; the next save tries again
            mark_best(self.run, metadata.best_by)
            remove_old_checkpoints(self.run, self.keep, metadata.step, metadata.best_by)
        return ""

    def _discard(self, folder: Path) -> None:
        """Remove an unfinished checkpoint, because on a full disk the next save needs the space."""
        if self.world.rank == 0:
            discard(folder)


def resume(prepared: Prepared, world: World, checkpoint: Checkpoint, expected: CheckpointMetadata) -> int:
    """Load a checkpoint under any layout; return the number of updates done. A collective.

    `expected` is the metadata of this training.
    A training of a different length (epochs, steps) is resumed with the learning rates of that length: its schedule
    takes `step` steps from its beginning (except ReduceLROnPlateau, whose saved state is loaded).

    Raises `UsageError` on every rank for a damaged checkpoint (and suggests the last good one), and for one of a
    different training.
    """
    on_rank_0(world, "resume", lambda: _check_same_training(checkpoint, expected))
    _check_whole(checkpoint, prepared)
    saved = contents_of(checkpoint)
    tensors = targets_for(prepared.trainable, world, saved)
    read(tensors, checkpoint, group_for_saving(prepared, world))
    load_copies(prepared.trainable.model, tensors)
    try:
        load_state(
            prepared.trainable,
            world,
            tensors,
            read_values(checkpoint),
            saved=saved,
            schedule_step=checkpoint.metadata.step if changed_lengths(checkpoint.metadata, expected) else None,
        )
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{checkpoint.path}: training.pt lacks values that this training needs ({type(error).__name__}: {error})"
        ) from error
    return checkpoint.metadata.step


def load_model(prepared: Prepared, world: World, checkpoint: Checkpoint) -> None:
    """Load only the model of a checkpoint; other settings may differ. Raises as `resume` does."""
    _check_whole(checkpoint, prepared)
    whole = contents_of(checkpoint).items()
    saved = {name: metadata for name, metadata in whole if name.startswith(("model/", "average/"))}
    tensors = targets_for(prepared.trainable, world, saved)
    read(tensors, checkpoint, group_for_saving(prepared, world))
    load_copies(prepared.trainable.model, tensors)
    if prepared.trainable.ema is not None and not any(name.startswith("average/") for name in saved):
        prepared.trainable.ema.reset()  # the saved training had no average


def _check_settings(settings: dict[str, Any]) -> None:
    """Raise `WorkloadError` for a setting that JSON cannot hold, such as a set."""
    for name, value in settings.items():
        try:
            json_form(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise WorkloadError(
                f"{_setting(name, settings)}: checkpoints cannot hold this value ({error}); "
                "use numbers, text, lists and dicts, or train with --save-every 0"
            ) from error


def _check_same_training(checkpoint: Checkpoint, expected: CheckpointMetadata) -> None:
    saved = checkpoint.metadata
    for name in ("workload", "seed", "global_batch", "clip_norm", "samples", "data_checksum"):
        was, now = getattr(saved, name), getattr(expected, name)
        if was != now:
            hint = f"; add {_FLAGS[name]}{was}" if name in _FLAGS else ""
            raise UsageError(
                f"{checkpoint.path}: it was trained with {name}={was}, but this training has {name}={now}{hint}. "
                "To start from its weights: everyrank checkpoint export, then --pretrained"
            )
    was, now = json_form(saved.settings), json_form(expected.settings)
    for name in sorted((was.keys() | now.keys()) - {"data", *LENGTHS}):  # compared by its checksum
        if was.get(name) != now.get(name):
            raise UsageError(
                f"{checkpoint.path}: it was trained with {_setting(name, was)}, but this training has "
                f"{_setting(name, now)}; use the same setting"
            )


_FLAGS = {"seed": "--set seed=", "global_batch": "--batch "}


def _setting(name: str, settings: dict[str, Any]) -> str:
    """Return a setting as typed, on one line. Escapes control characters, because the checkpoint may be foreign."""
    text = str(settings.get(name))
    text = text if text.isprintable() else repr(text)
    if name.startswith("Workload."):  # a field of Workload
        return f"{name}={text}" if name in settings else f"no {name}"
    if name.startswith("--"):
        return f"{name} {text}" if name in settings else f"no {name}"
    return f"--set {name}={text}" if name in settings else f"no --set {name}"


def _check_whole(checkpoint: Checkpoint, prepared: Prepared) -> None:
    """Read every file on one rank, and compare checksums. Raises `UsageError` on every rank for a damaged one."""
    world = prepared.world
    names = sorted(checkpoint.metadata.files)[world.rank :: world.size]
    damage_text = damage(checkpoint, names) or ""
    rows = all_gather(torch.tensor(list(damage_text.encode()), dtype=torch.uint8), world)
    damage_text = next((text for row in rows if (text := bytes(row.tolist()).decode())), "")
    if damage_text:
        refuse_damaged(checkpoint, damage_text)


# --- saves in the background: each rank copies to CPU the tensors that it will write


class Writers:
    """Assigns each tensor to the rank that writes it, over a group for CPU tensors. None: one process."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.agreed: list[str] = []
        self.local_names: set[str] = set()

    def own_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the `tensors` that this rank writes; one rank writes each part of each tensor. A collective.

        The ranks exchange their lists of tensors only when a list has changed.
        """
        if self.group is None:
            return dict(tensors)
        tensor_parts = [[name, _part(tensor), local_tensor(tensor).nbytes] for name, tensor in tensors.items()]
        digests = all_gather_json(hashlib.sha256(json.dumps(tensor_parts).encode()).hexdigest(), self.group)
        if digests != self.agreed:
            rank = dist.get_rank(self.group)
            # ranks with equal lists send them once
            gathered = all_gather_json(tensor_parts if digests.index(digests[rank]) == rank else None, self.group)
            rows = [gathered[digests.index(digest)] for digest in digests]
            self.local_names, self.agreed = _assign(rows)[rank], digests
        return {name: tensor for name, tensor in tensors.items() if name in self.local_names}


def _part(tensor: Tensor) -> list[int]:
    """Return which part of a DTensor this is: its coordinates along the mesh dimensions on which it is sharded."""
    if not isinstance(tensor, DTensor):
        return []
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside of a mesh has no part"
    pairs = zip(tensor.placements, coordinate, strict=True)
    return [-1 if placement.is_replicate() else mesh_coordinate for placement, mesh_coordinate in pairs]


def _assign(rows: list[list[Any]]) -> list[set[str]]:
    """Return the names that each rank writes, from every rank's (name, part, bytes)."""
    holders: dict[tuple[Any, ...], list[int]] = {}
    sizes: dict[tuple[Any, ...], int] = {}
    for rank, row in enumerate(rows):
        for name, shard, num_bytes in row:
            key = (name, *shard)
            holders.setdefault(key, []).append(rank)
            sizes[key] = num_bytes
    written = [0] * len(rows)
    names_by_rank: list[set[str]] = [set() for _ in rows]
    for key, ranks in holders.items():
        writer = min(ranks, key=lambda rank: (written[rank], rank))
        written[writer] += sizes[key] or 1
        names_by_rank[writer].add(key[0])
    return names_by_rank


def copies_on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on CPU. Synchronises once for each device, not for each tensor."""
    copies = {name: _copied(tensor) for name, tensor in tensors.items()}
    for device in {local_tensor(tensor).device for tensor in tensors.values()}:
        if device.type == "cuda":  # a model may be on several devices
            torch.cuda.synchronize(device)
    return copies


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy on CPU; from CUDA it is asynchronous, and complete after a synchronise."""
    if not isinstance(tensor, DTensor):
        return tensor.to("cpu", copy=True, non_blocking=True)
    local = tensor.to_local().to("cpu", copy=True, non_blocking=True)
    mesh = _on_cpu(tensor.device_mesh)
    return DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _on_cpu(mesh: DeviceMesh) -> DeviceMesh:
    """Return the same mesh on CPU, because DTensor moves a local tensor to the device of its mesh."""
    return mesh if mesh.device_type == "cpu" else _twin_on_cpu(mesh)


@functools.cache
def _twin_on_cpu(mesh: DeviceMesh) -> DeviceMesh:
    """Return a CPU mesh of the same ranks. It needs no groups, because nothing is sent over it."""
    return DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
