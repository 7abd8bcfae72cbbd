"""Cleans up if the audit is killed: a separate process ends the script's processes and removes the audit's folder.

This file runs as that process, with the folder as its only argument. It waits until its standard input closes, which
the audit holds open.
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

__all__ = ["end_script_processes", "guarded"]

_ENVIRONMENT = "EVERYRANK_AUDIT"  # as in watch/recorder.py, without importing numpy


@contextlib.contextmanager
def guarded(folder: Path) -> Generator[None]:
    """Run a guardian for the audit with this folder within the block."""
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


def end_script_processes(folder: Path) -> None:
    """End every process that the script has started, in any session. All inherit the audit's environment variable."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ValueError, OSError):
            settings = process.environ().get(_ENVIRONMENT)
            is_started_by_script = settings is not None and json.loads(settings).get("folder") == str(folder)
            if is_started_by_script and process.pid != os.getpid():
                process.kill()


def _clean_up_after_audit(folder: Path) -> None:
    sys.stdin.buffer.read()
    for _ in range(3):  # several times, for processes that were just being started
        end_script_processes(folder)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _clean_up_after_audit(Path(sys.argv[1]))
