"""What a call asked for, apart from the nouns. These travel to the ranks; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["BenchOptions", "TrainOptions", "VerifyOptions"]


@dataclass(frozen=True)
class TrainOptions:
    """For `train`. `started` is when it was called, in seconds since 1970; `out` the folder for log.jsonl.

    `profile` is the file for the trace of one step.
    """

    command: list[str]
    started: float
    epochs: int | None = None
    steps: int | None = None
    out: Path | None = None
    profile: Path | None = None
    show: bool = True


@dataclass(frozen=True)
class VerifyOptions:
    """For `verify`."""

    command: list[str]
    steps: int = 20
    samples: bool = False
    show: bool = True


@dataclass(frozen=True)
class BenchOptions:
    """For `bench`. `steps` is the length of the timed and of the untimed run."""

    command: list[str]
    started: float
    trials: int = 5
    steps: int | None = None
    verify_steps: int = 20
    batch_factor: int = 1  # weak scaling: the global batch grows with the number of ranks
    show: bool = True
