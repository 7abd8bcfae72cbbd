"""Records the lines that a script prints, logs or writes to a dashboard, by the line of the script."""

from __future__ import annotations

import functools
import logging
import re
import sys
from typing import Any

from everyrank.audit.watch.imports import after_import
from everyrank.audit.watch.place import where
from everyrank.rerun.inside.session import Session

__all__ = ["install_printed"]

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?(?![\w])")
_NOT_COMPARED = re.compile(  # times, dates, memory and speeds
    r"\d+:\d+(:\d+)?([.,]\d+)?|\d{4}-\d\d-\d\d|[\d.]+\s*[KMGT]i?B\b|[\d.]+(?:[eE][-+]?\d+)?\s*\w*/s(?:ec)?\b"
)
_MOST_LINES = 2000


class _Tee:
    """A stream that also records complete lines."""

    def __init__(self, session: Session, stream: Any) -> None:
        self._session, self._stream, self._line, self._place = session, stream, "", ""

    def write(self, text: str) -> int:
        if self._session.is_active:
            self._place = where() or self._place
            self._line += text
            *lines, self._line = self._line.split("\n")
            for line in lines:
                note(self._session, self._place, line.rpartition("\r")[2], "stdout")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def note(session: Session, place: str, text: str, stream: str) -> None:
    """Record a line with its numbers."""
    if not text.strip() or not place or len(session.printed) >= _MOST_LINES or not session.is_active:
        return
    _, _, occurrence = session.key(f"printed {stream}", place)
    plain = _NOT_COMPARED.sub(lambda found: " " * len(found[0]), text)
    numbers = list(_NUMBER.finditer(plain))
    session.printed.append(
        {
            "place": place,
            "occurrence": occurrence,
            "text": text[:400],
            "numbers": [float(number[0]) for number in numbers],
            "positions": [number.start() for number in numbers],
            "stream": stream,
            "update": session.update,
        }
    )


def install_printed(session: Session) -> None:
    """Hook print, logging and TensorBoard."""
    sys.stdout = _Tee(session, sys.stdout)
    handle = logging.Logger.handle

    @functools.wraps(handle)
    def logged(self: Any, record: Any) -> None:
        if session.is_active:
            note(session, where(), record.getMessage(), "logging")
        handle(self, record)

    logging.Logger.handle = logged

    def watch_writer(module: Any) -> None:
        add = module.SummaryWriter.add_scalar

        @functools.wraps(add)
        def added(self: Any, tag: Any, value: Any, *args: Any, **kwargs: Any) -> None:
            if session.is_active:
                note(session, where(), f"{tag} {float(value)!r}", "tensorboard")
            add(self, tag, value, *args, **kwargs)

        module.SummaryWriter.add_scalar = added

    after_import("torch.utils.tensorboard.writer", watch_writer)
