"""What a checkpoint of a training says of it."""

from __future__ import annotations

import zlib
from datetime import UTC, datetime

import torch

from everyrank._version import __version__
from everyrank.checkpoint import aliases_of
from everyrank.data import Streamed, UnevenStreams, epoch_of, is_uncounted
from everyrank.data.parts import weights_of
from everyrank.errors import UsageError
from everyrank.options import TrainOptions
from everyrank.runs import About
from everyrank.train.job import TrainingJob

__all__ = ["about_of"]


def about_of(job: TrainingJob, options: TrainOptions) -> About:
    """What a checkpoint of this training says of itself."""
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
    if source and source.batch is not None:  # the global batch is a field of its own
        settings["--lr-rule"] = source.lr_rule
    if workload.drop_last:
        settings["Workload.drop_last"] = True
    if workload.ema_decay is not None:
        settings["Workload.ema_decay"] = workload.ema_decay
    if isinstance(data, UnevenStreams):
        settings["Workload.train_data.streams"] = len(data.streams)
    if workload.weights is not None:
        settings["Workload.weights"] = zlib.crc32(weights_of(workload.weights, len(data)).numpy().tobytes())
    return About(
        step=0,
        workload=workload.name,
        settings=settings,
        seed=workload.seed,
        global_batch=workload.global_batch,
        clip_norm=workload.clip_norm,
        samples=0 if is_uncounted(data) or (isinstance(data, Streamed) and not data.is_whole) else len(data),
        # rank 0 alone compares it and writes it: making it may read all the data
        data_checksum=getattr(data, "checksum", None) if world.rank == 0 else None,
        layout=str(layout),
        world_size=world.size,
        updates_per_epoch=0 if is_uncounted(data) else epoch_of(workload, data).updates,
        best_by=options.best_by or names[0],
        versions={"everyrank": __version__, "torch": torch.__version__},
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        aliases=aliases_of(prepared.model),
    )
