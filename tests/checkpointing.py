"""Helpers for the tests of checkpoints: a training session that runs update by update, and functions for checkpoints.

The workload has every kind of state that a checkpoint could omit: tied and frozen parameters, buffers, and others.
"""

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


class MixedModel(nn.Module):
    """A model with a tied weight, batch norm, a frozen layer, buffers of two dtypes and a scalar parameter."""

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
    """Return two learning-rate schedules in sequence. The second one is active at the checkpoint."""
    schedules: list[LRScheduler] = [LinearLR(optimizer, 0.3, total_iters=3), MultiStepLR(optimizer, [4, 6], 0.5)]
    return SequentialLR(optimizer, schedules, milestones=[3])


def mixed_workload(optimizer: str = "sgd", **changed_fields: Any) -> Workload:
    """Return a workload whose samples have random noise from three generators.

    An epoch has 23 samples in batches of 7, so its updates have 7, 7, 7 and 2 samples.
    """
    fields = {"model": MixedModel, "blocks": "blocks", "clip_norm": 0.5, "schedule": schedule}
    return zoo.workload("augmented", optimizer, **(fields | changed_fields))


SAVE_STEP, END_STEP = 6, 11  # these steps are in the middle of the second and of the third epoch


class TrainingSession:
    """The training on one rank, which a test runs update by update."""

    def __init__(self, world: World, workload: Workload, layout: str) -> None:
        self.world, self.workload, self.layout = world, workload, parse_layout(layout)
        self.data = workload.train_data()
        self.prepared: Prepared = prepare(workload, self.layout, world)

    def metadata(self, best_by: str = "eval_loss") -> CheckpointMetadata:
        """Return the metadata that a checkpoint of this session gets."""
        workload, num_epoch_updates = self.workload, updates_per_epoch(len(self.data), self.workload.global_batch)
        world_fields = {"layout": str(self.layout), "world_size": self.world.size}
        data_fields = {"workload": workload.name, "settings": {}, "seed": workload.seed, "samples": len(self.data)}
        batch_fields = {"global_batch": workload.global_batch, "clip_norm": workload.clip_norm, "data_checksum": None}
        run_fields = {"updates_per_epoch": num_epoch_updates, "best_by": best_by, "versions": {}, "time": ""}
        return CheckpointMetadata(
            step=0,
            aliases=aliases_of(self.prepared.model),
            **world_fields,
            **data_fields,
            **batch_fields,
            **run_fields,
        )

    def train(self, start_step: int, end_step: int) -> list[Tensor]:
        """Run the updates from `start_step` to `end_step`. Return the local loss (sum, count) of each update."""
        num_epoch_updates = updates_per_epoch(len(self.data), self.workload.global_batch)
        selected_updates = list(all_updates(end_step, num_epoch_updates))[start_step:]
        local_losses = run_updates(self.prepared, self.data, selected_updates)
        return [local_loss.clone() for local_loss in local_losses]

    def make_saver(self, run: Path, keep: int = 3, in_background: bool = False, best_by: str = "eval_loss") -> Saver:
        """Return a saver that writes the checkpoints of this session to the folder of a run."""
        return Saver(run, self.prepared, self.world, self.metadata(best_by), keep, in_background)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return copies of the local tensors and of the other values in this rank's training state."""
        tensors = tensors_of(self.prepared.trainable, self.world)
        local_tensors = {
            name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()
        }
        values = copy.deepcopy(values_of(self.prepared.trainable))
        return {name: tensor.clone() for name, tensor in local_tensors.items()}, values


def read_checkpoint(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the full tensors and the other values of a checkpoint, under any layout."""
    tensors = {
        name: torch.zeros(description.size, dtype=description.properties.dtype)
        for name, description in contents_of(checkpoint).items()
    }
    read(tensors, checkpoint)
    return tensors, read_values(checkpoint)


def assert_equal_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    """Check that both have the same names and values. Without a tolerance, values are bitwise equal."""
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        if tolerance:
            torch.testing.assert_close(tensor, expected[name], rtol=tolerance, atol=tolerance, equal_nan=True, msg=name)
        else:
            assert tensor.dtype == expected[name].dtype, name
            assert torch.equal(tensor.nan_to_num(), expected[name].nan_to_num()), name


def train_and_resume(
    world: World, layout: str, workload: Workload, workers: int, run: Path, save_step: int = SAVE_STEP
) -> Any:
    """Train without interruption and save at `save_step`, then resume from the checkpoint in a second session.

    Return the step of the checkpoint ("begun") and the states of both sessions there ("at_save"). "whole" and "again"
    are the local losses after the checkpoint, and the final state, of the first and of the second session.
    """
    world = dataclasses.replace(world, loader_workers=workers)
    uninterrupted = TrainingSession(world, workload, layout)
    uninterrupted.train(0, save_step)
    uninterrupted.make_saver(run).save(save_step, {})
    saved_state = uninterrupted.state()
    expected = (uninterrupted.train(save_step, END_STEP), *uninterrupted.state())
    resumed = TrainingSession(world, workload, layout)
    first_losses = resumed.train(0, 2)  # resume has to replace every value of this trained model
    start_step = resume(resumed.prepared, world, find_checkpoint(run), resumed.metadata())
    assert first_losses
    return {"begun": start_step, "at_save": (saved_state, resumed.state()), "whole": expected} | {
        "again": (resumed.train(start_step, END_STEP), *resumed.state())
    }


def train_and_save(world: World, layout: str, optimizer: str, run: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train without interruption and save at SAVE_STEP. Return the later local losses and the final full model."""
    session = TrainingSession(world, mixed_workload(optimizer), f"{layout}:precision=float64")
    session.train(0, SAVE_STEP)
    session.make_saver(run).save(SAVE_STEP, {})
    return session.train(SAVE_STEP, END_STEP), session.prepared.full_state()


def global_losses(rank_results: list[tuple[list[Tensor], Any]]) -> list[float]:
    """Return the mean loss of each update over all ranks."""
    totals = [torch.stack(losses).sum(0) for losses in zip(*(result[0] for result in rank_results), strict=True)]
    return [float(total[0] / total[1]) for total in totals]


def save_with_scores(
    world: World, run: Path, metric: str, scores: list[float | None], keep: int, first_step: int = 1
) -> list[str]:
    """Save one checkpoint for each score. Return the names in the folder of checkpoints afterwards.

    `metric` selects the best checkpoint. It is a name, such as "top1", or a name and ":min" or ":max".
    """
    session = TrainingSession(world, zoo.workload("frozen"), "single")
    saver = session.make_saver(run, keep=keep, best_by=metric)
    for step, score in enumerate(scores, first_step):
        saver.save(step, {} if score is None else {metric.partition(":")[0]: score})
    return sorted(path.name for path in (run / "checkpoints").iterdir())


# the arguments of a short training of digits
DIGITS_ARGS = ("train", "digits", "--set", "width=4", "--steps", "6", "--device", "cpu")


def step_folder(run: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return run / "checkpoints" / f"step-{step:08d}"


def change_metadata(folder: Path, **changed_fields: Any) -> None:
    """Change fields of about.json and correct its checksum, as a deliberate change would."""
    metadata = json.loads((folder / "about.json").read_text())
    del metadata["crc"]
    (folder / "about.json").write_text(with_sum(metadata | changed_fields))


def update_checksums(folder: Path, *names: str) -> None:
    """Write the current sizes and checksums of these files to about.json, as a deliberate change would."""
    files = json.loads((folder / "about.json").read_text())["files"]
    for name in names:
        content = (folder / name).read_bytes()
        files[name] = [len(content), zlib.crc32(content)]
    change_metadata(folder, files=files)


def resume_digits(world: World, layout: str, path: Path) -> str:
    """Resume digits from a checkpoint. Return the error message, or "" if it succeeds."""
    workload = load(find_workload("digits", width=4))
    prepared = prepare(workload, parse_layout(layout), world)
    checkpoint = checkpoint_named(path)
    try:
        resume(prepared, world, checkpoint, checkpoint.metadata)
    except UsageError as error:
        return str(error)
    return ""
