"""A process beside an audit: when the audit is gone, what its script has started is ended, and its folder removed.

An audit that is ended by SIGKILL can do nothing any more. Started as a script of its own, with the audit.s folder as
the only argument, it waits for the end of its standard input, which the audit holds open.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import psutil

__all__ = ["end_all_of", "guarded"]

_ENVIRONMENT = "EVERYRANK_AUDIT"  # as in watch/recorder.py, without importing numpy


@contextlib.contextmanager
def guarded(folder: Path) -> Generator[None]:
    """While an audit with this folder is under way, a guardian waits for its end."""
    process = subprocess.Popen(  # noqa: S603  (this very file)
        [sys.executable, "-P", __file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def end_all_of(folder: Path) -> None:
    """End every process that the script has started, also in sessions of its own: all inherit the audit's settings."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ValueError, OSError):
            settings = process.environ().get(_ENVIRONMENT)
            is_of_it = settings is not None and json.loads(settings).get("folder") == str(folder)
            if is_of_it and process.pid != os.getpid():
                process.kill()


def _wait_for_the_audit(folder: Path) -> None:
    sys.stdin.buffer.read()
    for _ in range(3):  # one that was just being started has not been seen
        end_all_of(folder)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _wait_for_the_audit(Path(sys.argv[1]))
