"""TensorBoard and Weights & Biases behind one interface. Each is an optional package, imported when requested."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from everyrank.errors import CannotRunError, EveryrankError, UsageError, shortened

__all__ = ["TRACKERS", "Tracker", "open_tracker"]

TRACKERS = ("tensorboard", "wandb")


class Tracker(Protocol):
    """Logs values by name for an update."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log `values` after update `step`; steps increase."""
        ...

    def close(self) -> None:
        """Flush everything to disk or network."""
        ...


def open_tracker(name: str, run: Path, settings: Mapping[str, Any], first_step: int) -> Tracker:
    """Open a tracker for the run in this folder, from `first_step` on.

    Raises `UsageError` for an unknown name, `CannotRunError` if its package is missing, `EveryrankError` if it cannot
    start.
    """
    if name not in TRACKERS:
        raise UsageError(f"--tracker {name}: give one of {', '.join(TRACKERS)}")
    try:
        return _TensorBoard(run, first_step) if name == "tensorboard" else _Wandb(run, settings)
    except ImportError as error:
        raise CannotRunError(f"--tracker {name}: {error}; pip install 'everyrank[{name}]'") from error


class _TensorBoard:
    """Event files in the run's folder: tensorboard --logdir runs."""

    def __init__(self, run: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # a resumed run writes the points after its checkpoint again, so drop those of the earlier start;
        # a run that is restarted before its first checkpoint begins at step 0
        self.writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=first_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered."""
        self.writer.close()


class _Wandb:
    """Weights & Biases; WANDB_MODE=offline keeps everything in the run's folder."""

    def __init__(self, run: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        try:
            self.run: Any = wandb.init(
                project="everyrank",
                id=_id_of(run),
                name=run.name,
                dir=str(run),
                resume="allow",
                config=dict(settings),
                settings=wandb.Settings(silent=True),
            )
        except Exception as error:  # for example no key or no network
            text = shortened(" ".join(str(error).split())) or type(error).__name__
            is_online = os.environ.get("WANDB_MODE", "online") in ("", "online")
            advice = "; WANDB_MODE=offline needs neither key nor network" if is_online else ""
            raise EveryrankError(f"--tracker wandb: {text}{advice}") from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve. Weights & Biases drops points before the last one."""
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


def _id_of(run: Path) -> str:
    """Return the run's id at Weights & Biases, kept in its folder so that a resumed run continues the same curves."""
    file = run / "wandb-id"
    if not file.exists():
        with file.open("x") as new:  # fails for a dangling link
            new.write(uuid.uuid4().hex[:12])
    return file.read_text().strip()
