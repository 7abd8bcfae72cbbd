"""After an out-of-memory error, runs `everyrank plan` and adds its suggestion to the message."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

from everyrank.errors import EveryrankError, OutOfMemoryError, RankFailedError, UsageError
from everyrank.launch import rank_info_from_environment

__all__ = ["advising_on_memory", "with_smallest_change"]

_PLAN_TIMEOUT_SECONDS = 90.0  # for the trace of a few layouts


@contextlib.contextmanager
def advising_on_memory() -> Generator[None]:
    """Add the smallest change that fits in memory to an out-of-memory error of the ranks."""
    try:
        yield
    except (RankFailedError, OutOfMemoryError) as error:
        raise with_smallest_change(error) from None


def with_smallest_change(error: EveryrankError, timeout_seconds: float = _PLAN_TIMEOUT_SECONDS) -> EveryrankError:
    """Return the error with the smallest change that fits and its command at the end.

    The error is returned unchanged if it names no command of `everyrank plan`, if plan finds no change in time, or if
    an external launcher started this process, which is then a rank.
    """
    plan_command = str(error).partition("everyrank plan ")[2]
    try:
        is_rank = rank_info_from_environment(os.environ) is not None
        arguments = shlex.split(plan_command)
    except (UsageError, OSError, ValueError):
        return error
    if not plan_command or is_rank:
        return error
    print(
        f"everyrank: out of memory. Running `everyrank plan` to find a change that fits (up to {timeout_seconds:g} s)",
        file=sys.stderr,
    )
    with tempfile.TemporaryDirectory() as folder:
        plan_path = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "everyrank", "plan", *arguments, "--json", str(plan_path)]
        try:
            subprocess.run(  # noqa: S603
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_seconds,
                check=True,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            )
            change = json.loads(plan_path.read_text(encoding="utf-8"))["layouts"][0]["change"]
            text = f"{change['what']}: {change['command']}"
        except (subprocess.SubprocessError, OSError, ValueError, LookupError):
            return error
    advised = type(error)(f"{error}. Smallest change: {text}")
    advised.log = error.log
    return advised
