"""What a run of a script gives, and what a run can be made to use."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

__all__ = ["Imposed", "Printed", "RankRecording", "RecordedUpdate", "ScriptRecording", "Value", "read_recording"]


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor that a line of the script computed in the first update.

    is_of_forward  whether it was computed before the first backward
    """

    tensor: Any
    is_of_forward: bool


@dataclasses.dataclass(frozen=True)
class Draw:
    """Random numbers that a line drew. `loop` is whether the script had begun to train."""

    tensor: Any
    is_training: bool


@dataclasses.dataclass(frozen=True)
class Printed:
    """One line that the script printed, logged or wrote to a dashboard.

    place       the line of the script, "/path/train.py:12"
    occurrence  how often that line had printed before
    numbers     the numbers in the text, in order
    positions   where each of them begins in the text
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

    losses     value of each backward before the step
    backwards  their lines
    step       the line of the step
    gradients  at the step; None for a parameter without one
    before     parameters before the step
    after      parameters after it
    rates      learning rate of each parameter group, as the script has set it
    batches    number of batches that were read before the step
    states     buffers, and parameters of modules that no optimizer steps, when the next step begins
    optimizer  the line that made the optimizer
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
    """What one rank did.

    values   tensors of the first update, by (line, operation, occurrence)
    draws    random numbers, by (line, operation, occurrence)
    inputs   tensors given to the outermost model while training, in order, up to the first update
    batches  ([loader, pass], content, optimizer steps before it) of each batch that a loader gave
    facts    whatever else the hooks noted: "sizes" of batches, "refused" imposed content and the updates before it, ...
    reads    (rows, optimizer steps before) that the script took out of its tensors, by (line, operation, occurrence)
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
    """What all ranks of a run did.

    trouble    "" or one line: why the run did not end as it should
    traceback  of the first rank that failed
    float64    whether the script ran in float64, not in its own precision
    folder     where the recorded batches lie, for a run that they are imposed on
    """

    ranks: tuple[RankRecording, ...]
    trouble: str
    traceback: str
    seconds: float
    folder: Path
    float64: bool


@dataclasses.dataclass(frozen=True)
class Imposed:
    """What a run uses in place of its own.

    recording              read the batches and draws of these ranks, put together, and step with their learning rates
    by_rows                each rank reads its own recorded samples in order, in batches of the size that it asks for
    only_rank              take the batches and draws of this rank only, not of all
    evaluation_rank        take the batches of this rank only from loaders that no backward follows
    no_workers             loaders read in the process itself, not in workers
    parameters             after each step, take the recorded parameters
    order                  shuffle in one order on any number of ranks, and seed what a dataset draws by sample and pass
    rows                   draws of one row for each sample are the same for a sample, whichever rank has it
    seed                   seed of torch, numpy and random before the script starts
    without_checkpointing  keep activations instead of computing them again
    without_dropout        every kind of dropout returns its input
    backward_is_update     record each backward as an update, for a script that changes its weights by hand
    norms_over_ranks       batch norm takes the samples of all ranks, as SyncBatchNorm does on GPUs
    reads                  rows that the script itself takes out of its tensors are those of all ranks, put together
    larger                 name of an integer in the script to multiply by the ranks; `BATCH_SIZES` for all batch sizes.
                           Draws that keep their shape are then those of rank 0
    most_elements          of a larger tensor so many elements are kept, evenly spread, and its norm; 0 for all
    pass_batches           a pass over a loader has so many batches, the last one among them; 0 for all
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
    most_elements: int = 0


def read_recording(
    folder: Path, ranks: int, trouble: str, traceback: str, seconds: float, float64: bool
) -> ScriptRecording:
    """Read what the ranks wrote. A rank that wrote nothing has an empty recording."""
    import torch

    read: list[RankRecording] = []
    for rank in range(ranks):
        path, log = folder / f"rank{rank}.pt", folder / f"rank{rank}.log"
        output = log.read_text(errors="replace") if log.exists() else ""
        if not path.exists():
            read.append(RankRecording([], [], output, {}, {}, [], [], {}))
            continue
        content = torch.load(path, weights_only=True)
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
    return ScriptRecording(tuple(read), trouble, traceback, seconds, folder, float64)
