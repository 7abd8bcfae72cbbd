"""Explain in one paragraph why a job hangs: which rank did not reach which collective, and where all ranks wait.

    rank_state.py   files that each rank writes while it runs: its stack and its collectives
    rank_views.py   the state of each rank: its answer, its process, its stack read from outside
    lateness.py     finds the rank for which the others wait, by the arrival times at each collective
    verdict.py      the paragraph

No port is opened: ranks and the process that asks exchange files in a folder of the run. If the interpreter of a rank
is blocked, a signal makes Python's `faulthandler` write its stack.
"""

from __future__ import annotations

from pathlib import Path

from everyrank.errors import describe, is_user_code
from everyrank.launch.autopsy.rank_state import FOLDER, RankState, current_state, forget_hang, hang_report, keep_state
from everyrank.launch.autopsy.rank_views import last_frames, read_rank_views
from everyrank.launch.autopsy.verdict import location_text, verdict
from everyrank.launch.stalled_ranks import concerns_others

__all__ = [
    "FOLDER",
    "RankState",
    "current_state",
    "forget_hang",
    "hang_autopsy",
    "hang_report",
    "keep_state",
    "last_place",
    "last_words",
]


def hang_autopsy(folder: Path, timeout_seconds: float = 5.0) -> str | None:
    """Return the paragraph for the ranks that write their state to this folder; None if there are none."""
    views = read_rank_views(folder, timeout_seconds)
    return verdict(views) if views else None


def last_place(folder: Path, rank: int, ended_at: float) -> str:
    """`it was last seen at train.py:31 in main, 0.3 s earlier` for a rank that died without an error; "" if unknown."""
    frames, seen_at = last_frames(folder, rank)
    frames = [frame for frame in frames if is_user_code(frame[0])]
    if not frames:
        return ""
    seconds = ended_at - seen_at
    return f"it was last seen at {location_text(frames)}" + (f", {seconds:.1f} s earlier" if seconds > 0.1 else "")


def last_words(error: BaseException) -> str:
    """Record where this rank failed. If it waited for other ranks, explain why they did not arrive; else "".

    Must be called while the other ranks still run.
    """
    state, message = current_state(), describe(error)
    if state is None:
        return ""
    state.fail(error, message)
    return (hang_autopsy(state.folder) or "") if concerns_others(message) else ""
