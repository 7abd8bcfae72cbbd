"""A progress bar for long work, on rank 0 alone. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from everyrank.errors import printable

__all__ = ["progress"]


@contextlib.contextmanager
def progress(total: int, show: bool) -> Generator[Callable[[str], None]]:
    """A bar of `total` parts; call what it gives with the name of the part that begins. Gone when the block ends."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(quiet=not show)
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def begin(name: str) -> None:
            nonlocal begun
            bar.update(
                task, description=printable(name), completed=begun, refresh=True
            )  # never by itself: parts may be timed
            begun += 1

        yield begin
