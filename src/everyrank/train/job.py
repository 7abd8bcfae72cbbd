"""TrainingJob: the prepared model and its data. Evaluates it, and makes the metadata of its checkpoints."""

from __future__ import annotations

import zlib
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch

from everyrank._version import __version__
from everyrank.checkpoint import aliases_of
from everyrank.checkpoint.generators import generators, set_generators
from everyrank.data import Streamed, UnevenStreams, epoch_of, is_uncounted
from everyrank.data.parts import weights_of
from everyrank.errors import UsageError
from everyrank.loop import evaluate, mean_metrics
from everyrank.options import TrainOptions
from everyrank.runs import CheckpointMetadata
from everyrank.strategies import Prepared

__all__ = ["TrainingJob", "evaluate_job", "make_metadata"]


class TrainingJob(NamedTuple):
    """A prepared model and its data."""

    prepared: Prepared
    train_data: Any
    eval_data: Any


def evaluate_job(job: TrainingJob) -> dict[str, float]:
    """Return the metrics of the evaluation data over all ranks, {} without such data. A collective.

    Restores the random generators, so that the training does not depend on how often it is evaluated.
    """
    if job.eval_data is None:
        return {}
    generator_states = generators()
    metrics = mean_metrics(job.prepared.workload, evaluate(job.prepared, job.eval_data))
    set_generators(generator_states)
    return metrics


def make_metadata(job: TrainingJob, options: TrainOptions) -> CheckpointMetadata:
    """Return the metadata of this training's checkpoints. Raises `UsageError` for an unknown `--best` metric."""
    prepared, data = job.prepared, job.train_data
    workload, layout, world = prepared.workload, prepared.layout, prepared.world
    names = [name for name in (*workload.metrics, "eval_loss", *workload.derived) if not name.startswith("_")]
    name, _, direction = (options.best_by or names[0]).partition(":")
    if name not in names or direction not in ("", "min", "max"):
        raise UsageError(
            f"--best {options.best_by}: workload {workload.name} has {', '.join(names)}; NAME:min or NAME:max"
        )
    source = workload.source
    settings = dict(source.settings) if source else {}
    if source and source.batch is not None:  # the global batch is a separate field
        settings["--lr-rule"] = source.lr_rule
    if workload.drop_last:
        settings["Workload.drop_last"] = True
    if workload.ema_decay is not None:
        settings["Workload.ema_decay"] = workload.ema_decay
    if isinstance(data, UnevenStreams):
        settings["Workload.train_data.streams"] = len(data.streams)
    if workload.weights is not None:
        settings["Workload.weights"] = zlib.crc32(weights_of(workload.weights, len(data)).numpy().tobytes())
    return CheckpointMetadata(
        step=0,
        workload=workload.name,
        settings=settings,
        seed=workload.seed,
        global_batch=workload.global_batch,
        clip_norm=workload.clip_norm,
        samples=0 if is_uncounted(data) or (isinstance(data, Streamed) and not data.is_whole) else len(data),
        # only rank 0 uses it, and computing it may read all the data
        data_checksum=getattr(data, "checksum", None) if world.rank == 0 else None,
        layout=str(layout),
        world_size=world.size,
        updates_per_epoch=0 if is_uncounted(data) else epoch_of(workload, data).updates,
        best_by=options.best_by or names[0],
        versions={"everyrank": __version__, "torch": torch.__version__},
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        aliases=aliases_of(prepared.model),
    )
