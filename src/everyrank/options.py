"""What a call asked for, apart from the nouns. These travel to the ranks; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["BenchOptions", "PredictOptions", "TrainOptions", "VerifyOptions"]


@dataclass(frozen=True)
class TrainOptions:
    """For `train`.

    started          when it was called, in seconds since 1970
    epochs, steps    instead of the workload's own length
    out              the folder of the run; None: nothing is written
    profile          the file for the trace of one step
    resume           the folder of the checkpoint to go on from
    pretrained       the file of weights to begin from
    evaluate_only    evaluate, and do not train
    evaluate_every   updates between two evaluations; None: an epoch; 0: at the end alone
    save_every       updates between two checkpoints; None: an epoch; 0: never
    keep             how many of the last checkpoints stay, beside the best
    best_by          the metric that says which is the best; None: the workload's first, or eval_loss
    save_async       write checkpoints while the training goes on
    trackers         tensorboard, wandb
    """

    command: list[str]
    started: float
    epochs: int | None = None
    steps: int | None = None
    out: Path | None = None
    profile: Path | None = None
    resume: Path | None = None
    pretrained: Path | None = None
    evaluate_only: bool = False
    evaluate_every: int | None = None
    save_every: int | None = None
    keep: int = 3
    best_by: str | None = None
    save_async: bool = False
    trackers: tuple[str, ...] = ()
    show: bool = True


@dataclass(frozen=True)
class PredictOptions:
    """For `predict`. `out` is the file of predictions; the others as in `TrainOptions`."""

    command: list[str]
    out: Path
    resume: Path | None = None
    pretrained: Path | None = None
    training_data: bool = False
    show: bool = True


@dataclass(frozen=True)
class VerifyOptions:
    """For `verify`.

    by_name   somebody asked for these layouts, they are not simply all there are
    quick     float64 and few updates alone
    fresh     run `single` anew, whatever an earlier call has kept
    """

    command: list[str]
    steps: int = 20
    samples: bool = False
    show: bool = True
    by_name: bool = True
    quick: bool = False
    fresh: bool = False


@dataclass(frozen=True)
class BenchOptions:
    """For `bench`. `steps` is the length of the timed and of the untimed run; `by_name` as for `verify`.

    load_before   the load average of this machine at the call; None where the system has none
    """

    command: list[str]
    started: float
    trials: int = 5
    steps: int | None = None
    verify_steps: int = 20
    load_before: float | None = None
    batch_factor: int = 1  # weak scaling: the global batch grows with the number of ranks
    show: bool = True
    by_name: bool = True
