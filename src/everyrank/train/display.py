"""Prints the progress of a training: a progress bar on a terminal, and a line for every evaluation.

If standard output cannot be written, for example a closed pipe or a full disk, the training continues without it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from everyrank.errors import printable
from everyrank.launch.host_info import has_driver
from everyrank.options import TrainOptions
from everyrank.record import Record
from everyrank.runs import checkpoint_named
from everyrank.strategies import Prepared

__all__ = ["Display", "announce", "format_metrics", "summary_line"]


class Display:
    """Prints on rank 0; does nothing on the other ranks."""

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
        """Show a progress bar of `total` updates (None: unknown), of which `done` are done."""
        with self._without_broken_pipe():
            self.task = self.progress.add_task(name, total=total, completed=done, loss="", speed="")
            self.progress.start()

    def show(self, done: int, loss: float, samples_per_second: float) -> None:
        """Move the bar."""
        if self.task is not None:
            speed = f"{samples_per_second:,.0f} samples/s" if samples_per_second else ""
            with self._without_broken_pipe():
                self.progress.update(self.task, completed=done, loss=f"loss {loss:.4f}", speed=speed)

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        with self._without_broken_pipe():
            self.console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def end(self) -> None:
        """Remove the bar."""
        with self._without_broken_pipe():
            self.progress.stop()

    @contextlib.contextmanager
    def _without_broken_pipe(self) -> Generator[None]:
        try:
            yield
        except (OSError, SystemExit) as error:  # rich raises SystemExit if the pipe is closed
            self.console.quiet = True
            with contextlib.suppress(OSError, ValueError, AttributeError):  # discard all further output
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            reason = error.strerror if isinstance(error, OSError) else "the reader of the pipe has gone"
            with contextlib.suppress(OSError):
                print(f"standard output cannot be written ({reason}); the training continues", file=sys.stderr)


def format_metrics(values: Mapping[str, float]) -> str:
    """Return metrics as text, for example `eval_loss 0.0312, top1 0.9916`."""
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())


# --- before the first update, and at the end


def announce(
    prepared: Prepared, options: TrainOptions, start_step: int, end: int | None, display: Display, changes_size: bool
) -> None:
    """Print notes about the run before the first update, and show the progress bar.

    `changes_size`: whether ranks may leave and join during the training.
    """
    workload, world = prepared.workload, prepared.world
    ranks = f"{world.size} rank{'s' * (world.size > 1)}"
    if world.rank == 0 and workload.batch_rule is not None:
        display.line(workload.batch_rule)
    hosts = list(dict.fromkeys(world.hosts))
    if len(hosts) > 1:
        display.line(f"{ranks} on {', '.join(hosts)} · {' · '.join(world.choices.values())}")
    elif has_driver() and not world.choices["device"].endswith("requested"):
        display.line(world.choices["device"])  # so that a job without its GPU is noticed early
    if start_step:
        of_total = f" of {end}" if end is not None else ""
        display.line(f"resuming after update {start_step}{of_total}, from {options.resume}")
        if options.resume is not None and checkpoint_named(options.resume).metadata.schema == 1:
            display.line("an older everyrank saved it: its about.json has no checksum, so damage is not detected")
    parts = prepared.mesh.data_slice.count
    if changes_size and parts and workload.global_batch % parts:
        display.line(
            f"{workload.global_batch} samples of an update over {parts} ranks: some ranks read one more than others, "
            "and each sample has the same weight"
        )
    display.begin(f"{workload.name} · {prepared.layout} · {ranks}", end, start_step)


def summary_line(record: Record, start_step: int) -> str:
    """Return the summary line: updates, loss, speed, metrics and device."""
    speed = record.throughput_samples_per_second
    parts: list[str] = []
    if record.loss:
        done = f"{len(record.loss)} updates" if not start_step else f"updates from {start_step}"
        parts = [done, f"loss {record.loss[-1]:.6f}"]
    parts += [f"{speed.median:,.0f} samples/s"] if speed else []
    parts += [format_metrics(record.metrics)] if record.metrics else []
    world_and_device = f"{record.world_size} on {record.device} ({record.backend})"
    return f"{record.workload} · {record.layout} · {world_and_device}: " + ", ".join(parts)
