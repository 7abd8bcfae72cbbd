"""What a person sees of a training: a progress bar where there is a terminal, and a line for every evaluation.

Where it cannot be shown (a reader that has gone, a full disk behind `> file`), the training goes on unseen.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from everyrank.errors import printable

__all__ = ["Display", "format_metrics"]


class Display:
    """The screen of rank 0; the other ranks have one that shows nothing."""

    def __init__(self, show: bool) -> None:
        self.console = Console(quiet=not show)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.task: TaskID | None = None

    def begin(self, name: str, total: int | None, done: int) -> None:
        """A bar of `total` updates (None: nobody knows how many), of which some are done."""
        with self._shown():
            self.task = self.progress.add_task(name, total=total, completed=done, loss="", speed="")
            self.progress.start()

    def show(self, done: int, loss: float, samples_per_second: float) -> None:
        """Move the bar."""
        if self.task is not None:
            speed = f"{samples_per_second:,.0f} samples/s" if samples_per_second else ""
            with self._shown():
                self.progress.update(self.task, completed=done, loss=f"loss {loss:.4f}", speed=speed)

    def line(self, text: str) -> None:
        """A line that stays, above the bar."""
        with self._shown():
            self.console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def end(self) -> None:
        """Take the bar away."""
        with self._shown():
            self.progress.stop()

    @contextlib.contextmanager
    def _shown(self) -> Generator[None]:
        try:
            yield
        except (OSError, SystemExit) as error:  # rich ends the program where its reader has gone
            self.console.quiet = True
            with contextlib.suppress(OSError, ValueError, AttributeError):  # whatever is still to come goes nowhere
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            what = error.strerror if isinstance(error, OSError) else "its reader has gone"
            with contextlib.suppress(OSError):
                print(f"standard output cannot be written ({what}); the training goes on", file=sys.stderr)


def format_metrics(values: Mapping[str, float]) -> str:
    """`eval_loss 0.0312, top1 0.9916`."""
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())
