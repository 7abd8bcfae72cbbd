"""What rank 0 shows while work goes on: a bar, a line for each row that is known. Imports no torch."""

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
    """A bar of `total` parts; call what it gives with the name of the part that begins. Gone when the block ends."""
    from rich.console import Console  # not for who only imports everyrank
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
            )  # never by itself: parts may be timed
            begun += 1

        yield begin


def row_known(line: str) -> None:
    """Say what is known of a row as soon as it is: a line that stays, with or without a terminal, above a bar."""
    try:
        print(printable(line), flush=True)
    except OSError:  # whoever read our output has gone; the work goes on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)


@contextlib.contextmanager
def said_once(active: bool = True) -> Generator[None]:
    """While the block runs, a line that was printed already is not printed again, where `active`.

    A person's model that prints when it is built is built again and again by whoever compares and measures it.
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
    """A stream that hands on each line once, and all else to the stream below."""

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
        """Hand on a line that was begun."""
        self.screen.write(self.begun)
        self.begun = ""
