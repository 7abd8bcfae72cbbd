"""train_single: trains a workload on one device in a plain loop, to compare it with its script."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from everyrank.errors import WorkloadError
from everyrank.parallel.parallelize import call_model
from everyrank.workload.find import import_file

__all__ = ["train_single"]


def train_single(settings_path: str) -> None:
    """Train with the samples, the initial weights and the seeds of the script's run, until the hooks end the process.

    The file at `settings_path` has the path of the workload's file, the recording of the script and the details of
    its loader.
    """
    settings = json.loads(Path(settings_path).read_text())
    recording = torch.load(settings["recording"], weights_only=True)
    workload = import_file(Path(settings["file"])).workload
    for states in recording["facts"].get("rng", []):
        _set_rng(states)
    data = workload.train_data()
    if workload.eval_data is not None:
        workload.eval_data()
    torch.manual_seed(settings["loader"]["seed"])
    backwards = settings["backwards"]
    loader = DataLoader(
        data,
        batch_size=workload.global_batch // backwards,
        sampler=_sampler(settings["loader"], data, workload),
        collate_fn=workload.collate,
        drop_last=workload.drop_last,
    )
    torch.manual_seed(workload.seed)
    model = workload.model()
    _set_parameters(model, recording["updates"][0]["before"])
    optimizer = workload.optimizer(model)
    schedule: Any = workload.schedule(optimizer) if workload.schedule is not None else None
    follows_evaluation = isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
    for _ in range(settings["early_passes"]):
        next(iter(loader))
    num_backwards = 0
    while True:
        model.train()
        for batch in loader:
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise WorkloadError("a sample must be (input, target)")
            model_input, target = batch
            total, count = workload.loss(call_model(model, model_input), target)
            (total / count / backwards).backward()
            num_backwards += 1
            if num_backwards % backwards:
                continue
            if workload.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), workload.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None and not follows_evaluation:
                schedule.step()


def _sampler(loader: dict[str, Any], data: Any, workload: Any) -> Any:
    """Return a sampler with the order of the script's loader."""
    if workload.weights is not None:
        return WeightedRandomSampler(workload.weights(), len(data))
    kinds = {
        "SubsetRandomSampler": lambda: SubsetRandomSampler(range(len(data))),
        "RandomSampler": lambda: RandomSampler(data),
    }
    return kinds.get(loader["sampler"], lambda: SequentialSampler(data))()


def _set_rng(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    key, position = states["numpy"]
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), int(position), 0, 0.0))
    random.setstate(states["random"])


def _set_parameters(model: torch.nn.Module, recorded: dict[str, torch.Tensor]) -> None:
    """Set the parameters to the recorded weights, whose names begin with the class of the model."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in recorded.items():
            parameter = parameters.get(name.partition(": ")[2])
            if parameter is None or parameter.shape != value.shape:
                raise WorkloadError(f"the model has no parameter {name} of shape {tuple(value.shape)}")
            parameter.copy_(value)
