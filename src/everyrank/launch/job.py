"""What is started: how (`Launch`), and what runs in each process (`Job`)."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyrank.errors import UsageError

__all__ = ["LAUNCHERS", "Job", "Launch", "Named"]

LAUNCHERS = ("spawn", "torchrun")
_LONGEST_TIMEOUT = 10_000_000  # four months; clocks of 32 bits end not far behind


@dataclass(frozen=True)
class Launch:
    """How processes start.

    launcher         spawn or torchrun
    processes        ranks in all
    device           cpu or cuda; None: cuda where there is one
    backend          gloo or nccl; None: chosen by `world.choose_backend`
    loader_workers   data loader processes of each rank; 0 loads in the rank itself
    timeout_seconds  longest wait for another rank, at start, in a collective and at the end
    logs             folder for the ranks' logs; None: a temporary one, kept only after a failure

    Raises `UsageError` for a value that cannot be meant.
    """

    launcher: str = "spawn"
    processes: int = 1
    device: str | None = None
    backend: str | None = None
    loader_workers: int = 0
    timeout_seconds: float = 300.0
    logs: Path | None = None

    def __post_init__(self) -> None:
        if self.launcher not in LAUNCHERS:
            raise UsageError(f"--launcher {self.launcher}: give one of {', '.join(LAUNCHERS)}")
        if self.processes < 1:
            raise UsageError(f"--processes {self.processes}: give at least 1")
        if self.device not in (None, "cpu", "cuda"):
            raise UsageError(f"--device {self.device}: give cpu or cuda")
        if self.backend not in (None, "gloo", "nccl"):
            raise UsageError(f"--backend {self.backend}: give gloo or nccl")
        if self.loader_workers < 0:
            raise UsageError(f"--workers {self.loader_workers}: give 0 or more")
        if not 0 < self.timeout_seconds <= _LONGEST_TIMEOUT:
            raise UsageError(
                f"--timeout {self.timeout_seconds:g}: give more than 0 seconds, and at most {_LONGEST_TIMEOUT:,}"
            )


@dataclass(frozen=True)
class Named:
    """A function by its name, imported where it is called: the caller's own process needs no torch.

    `Named("everyrank.train:train_rank")(facts, ...)`.
    """

    target: str

    def __call__(self, *arguments: Any) -> Any:
        """Import it and call it."""
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)(*arguments)


@dataclass(frozen=True)
class Job:
    """What each process finds in its directory. The payload is opened after `sys_path` is in place."""

    payload: bytes
    sys_path: list[str]
    processes: int
    parent_pid: int
    logs: Path

    def function(self) -> Callable[..., Any]:
        """What to call."""
        return pickle.loads(self.payload)[0]  # noqa: S301  (our own parent wrote it)

    def arguments(self) -> tuple[Any, ...]:
        """With what, after the rank facts."""
        return pickle.loads(self.payload)[1]  # noqa: S301
