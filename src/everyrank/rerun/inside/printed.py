"""Records the lines of output that a script prints, logs or writes to a dashboard, by the line of the script."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import sys
from typing import Any

from everyrank.audit.watch.imports import after_import
from everyrank.audit.watch.source_location import user_line
from everyrank.rerun.inside.session import Session

__all__ = ["install_printed"]

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?(?![\w])")
_NOT_COMPARED = re.compile(  # times, dates, memory and speeds, which differ between runs
    r"\d+:\d+(:\d+)?([.,]\d+)?|\d{4}-\d\d-\d\d|[\d.]+\s*[KMGT]i?B\b|[\d.]+(?:[eE][-+]?\d+)?\s*\w*/s(?:ec)?\b"
)
_MAX_LINES = 2000


class _Tee:
    """A stream that also records complete lines."""

    def __init__(self, session: Session, stream: Any) -> None:
        self._session, self._stream, self._line, self._location = session, stream, "", ""

    def write(self, text: str) -> int:
        if self._session.is_active:
            self._location = user_line() or self._location
            self._line += text
            *lines, self._line = self._line.split("\n")
            for line in lines:
                record_line(self._session, self._location, line.rpartition("\r")[2], "stdout")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def record_line(session: Session, location: str, text: str, stream: str) -> None:
    """Record a line of output with its numbers."""
    if not text.strip() or not location or len(session.printed) >= _MAX_LINES or not session.is_active:
        return
    _, _, occurrence = session.key(f"printed {stream}", location)
    plain = _NOT_COMPARED.sub(lambda matched: " " * len(matched[0]), text)
    numbers = list(_NUMBER.finditer(plain))
    session.printed.append(
        {
            "place": location,
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
    def record_and_handle(self: Any, record: Any) -> None:
        if session.is_active:
            with contextlib.suppress(Exception):  # logging also only reports a text that does not fit its arguments
                record_line(session, user_line(), record.getMessage(), "logging")
        handle(self, record)

    logging.Logger.handle = record_and_handle

    def watch_writer(module: Any) -> None:
        add_scalar = module.SummaryWriter.add_scalar

        @functools.wraps(add_scalar)
        def record_and_add(self: Any, tag: Any, value: Any, *args: Any, **kwargs: Any) -> None:
            if session.is_active:
                record_line(session, user_line(), f"{tag} {float(value)!r}", "tensorboard")
            add_scalar(self, tag, value, *args, **kwargs)

        module.SummaryWriter.add_scalar = record_and_add

    after_import("torch.utils.tensorboard.writer", watch_writer)
