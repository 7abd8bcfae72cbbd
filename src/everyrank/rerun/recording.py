"""The recording of a script's run, and the values that can be imposed on a run."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
from pathlib import Path
from typing import Any

__all__ = [
    "EVALUATION_PASSES",
    "SHAPES_DIFFER",
    "Imposed",
    "Printed",
    "RankRecording",
    "RecordedUpdate",
    "ScriptRecording",
    "Value",
    "load_rank",
    "read_recording",
]


SHAPES_DIFFER = "ranks read samples of different shapes, such as texts padded to each batch's length"
"""Why batches of loaders are not merged."""

EVALUATION_PASSES = 10**6
"""The number of the first pass over a loader without gradients. Passes with gradients count from 0."""


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor that a line of the script computed in the first update.

    is_of_forward  whether it was computed before the first backward
    """

    tensor: Any
    is_of_forward: bool


@dataclasses.dataclass(frozen=True)
class Draw:
    """Random numbers that a line drew. `is_training` is whether the script had started to train."""

    tensor: Any
    is_training: bool


@dataclasses.dataclass(frozen=True)
class Printed:
    """One line that the script printed, logged or wrote to a dashboard.

    place       the line of the script, "/path/train.py:12"
    occurrence  how often that line had printed before
    numbers     the numbers in the text, in order
    positions   start of each number in the text
    stream      "stdout", "logging" or "tensorboard"
    update      optimizer steps before it
    """

    place: str
    occurrence: int
    text: str
    numbers: list[float]
    positions: list[int]
    stream: str
    update: int


@dataclasses.dataclass(frozen=True)
class RecordedUpdate:
    """One optimizer step of one rank. Tensors are local shards, by parameter name.

    losses     loss of each backward of the update
    backwards  lines of the backwards
    step       line of the optimizer step
    gradients  gradients at the step; None for a parameter without a gradient
    before     parameters before the step
    after      parameters after the step
    rates      learning rate of each parameter group, as the script has set it
    batches    number of batches that were read before the step
    states     buffers, and parameters that no optimizer updates, when the next step begins
    optimizer  line that constructs the optimizer
    momenta    momentum or betas of each parameter group
    """

    losses: list[float]
    backwards: list[str]
    step: str
    gradients: dict[str, Any]
    before: dict[str, Any]
    after: dict[str, Any]
    rates: list[float]
    batches: int
    states: dict[str, Any]
    optimizer: str = ""
    momenta: list[dict[str, Any]] = dataclasses.field(default_factory=list[dict[str, Any]])


@dataclasses.dataclass(frozen=True)
class RankRecording:
    """The recording of one rank.

    values   tensors of the first update, by (line, operation, occurrence)
    draws    random numbers, by (line, operation, occurrence)
    inputs   tensor arguments of the model while training, in order, up to the first update
    batches  ([loader, pass], content, optimizer steps before it) of each batch that a loader yielded
    facts    other records of the hooks, such as "refused": (reason, update) of values that could not be imposed
    reads    (rows, optimizer steps before) that the script took from its tensors, by (line, operation, occurrence)
    """

    updates: list[RecordedUpdate]
    printed: list[Printed]
    output: str
    values: dict[tuple[str, str, int], Value]
    draws: dict[tuple[str, str, int], Draw]
    inputs: list[list[Any]]
    batches: list[tuple[list[int], Any, int]]
    facts: dict[str, Any]
    reads: dict[tuple[str, str, int], tuple[Any, int]] = dataclasses.field(default_factory=dict[Any, Any])


@dataclasses.dataclass(frozen=True)
class ScriptRecording:
    """The recordings of all ranks of a run.

    failure    why the run failed, in one line; "" if it did not
    traceback  traceback of the first rank that failed
    float64    whether the script ran in float64 instead of its own precision
    folder     folder of the recorded batches, for a run on which they are imposed
    """

    ranks: tuple[RankRecording, ...]
    failure: str
    traceback: str
    seconds: float
    folder: Path
    float64: bool


@dataclasses.dataclass(frozen=True)
class Imposed:
    """Values and settings that are imposed on a run.

    recording              use the merged batches and random numbers of these ranks, and their learning rates
    by_rows                each rank reads its recorded samples in order, in batches of the size that it requests
    only_rank              use only the batches and random numbers of this rank
    evaluation_rank        use only the batches of this rank for loaders that no backward follows
    no_workers             loaders read in the main process, without workers
    parameters             use the recorded parameters after each step
    order                  shuffle equally on any number of ranks, and seed a dataset's draws by sample and pass
    rows                   draws with one row for each sample depend only on the sample, not on its rank
    seed                   seed of torch, numpy and random before the script starts
    without_checkpointing  disable activation checkpointing
    without_dropout        disable dropout of all kinds
    backward_is_update     record each backward as an update, for a script that changes its weights by hand
    norms_over_ranks       batch norm uses the samples of all ranks, as SyncBatchNorm does on GPUs
    reads                  rows that the script takes from its tensors are replaced by the merged rows of all ranks
    larger                 name of an integer in the script to multiply by the number of ranks; `BATCH_SIZES` for all
                           batch sizes. Random numbers that keep their shape are then those of rank 0
    max_elements          number of evenly spread elements to store of larger tensors, with their norm; 0 for all
    pass_batches           number of batches of each pass over a loader, including the last one; 0 for all
    """

    recording: ScriptRecording | None = None
    by_rows: bool = False
    only_rank: int | None = None
    evaluation_rank: int | None = None
    no_workers: bool = False
    parameters: bool = False
    order: bool = False
    rows: bool = False
    seed: int | None = None
    without_checkpointing: bool = False
    without_dropout: bool = False
    backward_is_update: bool = False
    norms_over_ranks: bool = False
    pass_batches: int = 0
    reads: bool = False
    larger: str = ""
    max_elements: int = 0


def load_rank(path: Path) -> dict[str, Any]:
    """Load what a rank has recorded."""
    import torch

    try:
        return torch.load(path, weights_only=True)
    except pickle.UnpicklingError:
        importlib.import_module("torch.distributed.tensor")  # torch.load knows DTensors only after this import
        return torch.load(path, weights_only=True)


def read_recording(
    folder: Path, ranks: int, failure: str, traceback: str, seconds: float, float64: bool
) -> ScriptRecording:
    """Read the recordings of the ranks. A rank that has written nothing gets an empty one."""
    read: list[RankRecording] = []
    for rank in range(ranks):
        path, log = folder / f"rank{rank}.pt", folder / f"rank{rank}.log"
        output = log.read_text(errors="replace") if log.exists() else ""
        if not path.exists():
            read.append(RankRecording([], [], output, {}, {}, [], [], {}))
            continue
        content = load_rank(path)
        read.append(
            RankRecording(
                [RecordedUpdate(**update) for update in content["updates"]],
                [Printed(**line) for line in content["printed"]],
                output,
                {tuple(key): Value(*value) for key, value in content["values"]},
                {tuple(key): Draw(*value) for key, value in content["draws"]},
                content["inputs"],
                content["batches"],
                content["facts"],
                {tuple(key): (rows, update) for key, (rows, update) in content["reads"]},
            )
        )
    return ScriptRecording(tuple(read), failure, traceback, seconds, folder, float64)
