"""The progress bar of rank 0, and a line for each finished row. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Generator
from typing import Any

from everyrank.errors import printable

__all__ = ["print_lines_once", "print_row", "progress"]


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
        num_started = 0

        def advance(name: str) -> None:
            nonlocal num_started
            # refreshed here and not by a thread, because parts may be timed
            bar.update(task, description=printable(name), completed=num_started, refresh=True)
            num_started += 1

        yield advance


def print_row(line: str) -> None:
    """Print a line for a finished row, above the bar."""
    try:
        print(printable(line), flush=True)
    except OSError:  # standard output is closed; continue without it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)


@contextlib.contextmanager
def print_lines_once(active: bool = True) -> Generator[None]:
    """Print each line only once while the block runs, if `active`.

    verify and bench build a user's model many times, and it may print when it is built.
    """
    if not active:
        yield
        return
    stream = _OnceStream(sys.stdout)
    with contextlib.redirect_stdout(stream):  # pyright: ignore[reportArgumentType]  (it has the methods of a stream)
        try:
            yield
        finally:
            stream.end()


class _OnceStream:
    """A stream that writes each line once, and forwards everything else."""

    def __init__(self, screen: Any) -> None:
        self.screen, self.incomplete_line = screen, ""
        self.seen: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.screen, name)

    def write(self, text: str) -> int:
        *lines, self.incomplete_line = (self.incomplete_line + text).split("\n")
        for line in lines:
            if line not in self.seen:
                self.seen.add(line)
                self.screen.write(line + "\n")
        return len(text)

    def end(self) -> None:
        """Write an incomplete last line."""
        self.screen.write(self.incomplete_line)
        self.incomplete_line = ""
