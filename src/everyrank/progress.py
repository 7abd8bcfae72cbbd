"""The progress bar of rank 0, and a line for each finished row. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Generator
from typing import Any

from everyrank.errors import printable

__all__ = ["progress", "row_known", "said_once"]


@contextlib.contextmanager
def progress(total: int, show: bool) -> Generator[Callable[[str], None]]:
    """Show a bar of `total` parts while the block runs; yield a function to call with the name of each part."""
    from rich.console import Console  # imported here, so that `import everyrank` stays fast
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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
            )  # no refresh thread, because parts may be timed
            begun += 1

        yield begin


def row_known(line: str) -> None:
    """Print a line for a finished row, above the bar."""
    try:
        print(printable(line), flush=True)
    except OSError:  # standard output is closed; continue without it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)


@contextlib.contextmanager
def said_once(active: bool = True) -> Generator[None]:
    """Print each line only once while the block runs, if `active`.

    verify and bench build a user's model many times, and it may print when it is built.
    """
    if not active:
        yield
        return
    once = _Once(sys.stdout)
    with contextlib.redirect_stdout(once):  # pyright: ignore[reportArgumentType]  (it has what a stream has)
        try:
            yield
        finally:
            once.end()


class _Once:
    """A stream that writes each line once, and forwards everything else."""

    def __init__(self, screen: Any) -> None:
        self.screen, self.begun = screen, ""
        self.seen: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.screen, name)

    def write(self, text: str) -> int:
        *lines, self.begun = (self.begun + text).split("\n")
        for line in lines:
            if line not in self.seen:
                self.seen.add(line)
                self.screen.write(line + "\n")
        return len(text)

    def end(self) -> None:
        """Write an incomplete last line."""
        self.screen.write(self.begun)
        self.begun = ""
