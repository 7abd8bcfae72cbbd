"""Shared parts of the image classification workloads: loss, top-1, top-5, and the optimizer of their papers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everyrank.builtin import RESNET_DEPTHS
from everyrank.builtin.schedules import MILESTONES, make_lr_schedule
from everyrank.data import updates_per_epoch
from everyrank.errors import WorkloadError
from everyrank.workload import Workload

__all__ = [
    "best_class",
    "check_at_least_one",
    "check_depth",
    "check_dropout",
    "classification_loss",
    "classify",
    "count_correct",
    "data_folder",
    "top5",
]


def classification_loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Return (cross entropy summed over the images, number of images): (B, classes), (B,)."""
    return F.cross_entropy(output, target, reduction="sum"), len(target)


def count_correct(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Return (correctly classified images, images): (B, classes), (B,)."""
    return (output.argmax(1) == target).sum(), len(target)


def top5(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Return (images whose class is among the five likeliest, images): (B, classes), (B,)."""
    likeliest = output.topk(min(5, output.shape[1]), dim=1).indices
    return (likeliest == target.unsqueeze(1)).any(1).sum(), len(target)


def best_class(output: Tensor) -> Tensor:
    """Return the likeliest class of each image: (B, classes) -> (B,)."""
    return output.argmax(1)


def check_at_least_one(**settings: int) -> None:
    """Raise `WorkloadError` for a setting below 1."""
    for name, value in settings.items():
        if value < 1:
            raise WorkloadError(f"--set {name}={value}: give at least 1")


def check_depth(depth: int) -> None:
    """Raise `WorkloadError` for a depth that `ResNet` does not have."""
    if depth not in RESNET_DEPTHS:
        raise WorkloadError(f"--set depth={depth}: give one of {', '.join(map(str, RESNET_DEPTHS))}")


def check_dropout(dropout: float) -> None:
    """Raise `WorkloadError` for a dropout that is not a probability."""
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise WorkloadError(f"--set dropout={dropout}: give a number from 0 to below 1")


def data_folder(data: str | None, name: str, expected: str) -> Path:
    """Return the folder of the data. Raises `WorkloadError` that describes the expected files and their source."""
    if data is None:
        raise WorkloadError(f"{name} needs --data DIR: {expected}")
    path = Path(data)
    if not path.exists():
        raise WorkloadError(f"--data {data}: there is no such folder; {name} needs {expected}")
    return path


def classify(
    name: str,
    model: Callable[[], nn.Module],
    train_data: Callable[[], Any],
    eval_data: Callable[[], Any],
    *,
    lr: float,
    batch: int,
    epochs: int,
    seed: int,
    schedule: str,
    warmup: float,
    weight_decay: float,
    milestones: Sequence[float] | None = None,
    order: str = "global",
) -> Workload:
    """Return a workload that trains `model` with SGD and momentum; `warmup` and `milestones` are in epochs."""
    if isinstance(milestones, int | float):
        milestones = (milestones,)
    check_at_least_one(batch=batch, epochs=epochs)
    if not 0 <= warmup < epochs:
        raise WorkloadError(f"--set warmup={warmup:g}: give a number of epochs from 0 to below {epochs}")
    if milestones is not None and schedule != "multistep":
        raise WorkloadError(f"--set milestones with schedule={schedule}: only schedule=multistep has milestones")
    if milestones is not None and not all(0 < milestone < epochs for milestone in milestones):
        numbers = ",".join(f"{milestone:g}" for milestone in milestones)
        raise WorkloadError(f"--set milestones={numbers}: give epochs between 0 and {epochs}")
    parts = tuple(milestone / epochs for milestone in milestones) if milestones is not None else MILESTONES
    updates_an_epoch = updates_per_epoch(len(train_data()), batch)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=weight_decay)

    return Workload(
        name=name,
        model=model,
        train_data=train_data,
        eval_data=eval_data,
        loss=classification_loss,
        metrics={"top1": count_correct, "top5": top5},
        predict=best_class,
        optimizer=optimizer,
        schedule=make_lr_schedule(schedule, epochs * updates_an_epoch, round(warmup * updates_an_epoch), parts),
        order=order,
        global_batch=batch,
        epochs=epochs,
        seed=seed,
        blocks="blocks",
    )
