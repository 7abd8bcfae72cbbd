"""Places that draw curves, behind one small interface. Each is an extra, imported where it is asked for."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from everyrank.errors import CannotRunError, EveryrankError, UsageError

__all__ = ["TRACKERS", "Tracker", "open_tracker"]

TRACKERS = ("tensorboard", "wandb")


class Tracker(Protocol):
    """Takes numbers by name, at an update."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """`values` after update `step`; steps never go back."""
        ...

    def close(self) -> None:
        """Everything is on the disk, or sent, when this returns."""
        ...


def open_tracker(name: str, run: Path, about: Mapping[str, Any], first_step: int) -> Tracker:
    """A tracker for the run in this folder, which begins or goes on with `first_step`.

    Raises `UsageError` for a name that is none, `CannotRunError` where its library is missing or cannot start.
    """
    if name not in TRACKERS:
        raise UsageError(f"--tracker {name}: give one of {', '.join(TRACKERS)}")
    try:
        return _TensorBoard(run, first_step) if name == "tensorboard" else _Wandb(run, about)
    except ImportError as error:
        raise CannotRunError(f"--tracker {name}: {error}; pip install 'everyrank[{name}]'") from error


class _TensorBoard:
    """Event files in the run's folder: tensorboard --logdir runs."""

    def __init__(self, run: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # what an earlier attempt wrote after the checkpoint is no longer true
        self.writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=first_step + 1 if first_step else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One point in each curve."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered."""
        self.writer.close()


class _Wandb:
    """Weights & Biases; WANDB_MODE=offline keeps everything in the run's folder."""

    def __init__(self, run: Path, about: Mapping[str, Any]) -> None:
        import wandb

        try:
            self.run: Any = wandb.init(
                project="everyrank",
                id=_id_of(run),
                name=run.name,
                dir=str(run),
                resume="allow",
                config=dict(about),
                settings=wandb.Settings(silent=True),
            )
        except Exception as error:  # it has many kinds: no key, no network, ...
            line = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise EveryrankError(
                f"--tracker wandb: {line}; WANDB_MODE=offline needs neither key nor network"
            ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One point in each curve; those before the last one logged are dropped there."""
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


def _id_of(run: Path) -> str:
    """The run's name there: kept in its folder, so that one that goes on is the same run, and no two share one."""
    file = run / "wandb-id"
    if not file.exists():
        with file.open("x") as new:  # a link that leads nowhere is not followed
            new.write(uuid.uuid4().hex[:12])
    return file.read_text().strip()
