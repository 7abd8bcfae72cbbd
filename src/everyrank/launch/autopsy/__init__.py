"""Why a job hangs, in one paragraph: who never came to which collective, where it stands, where the others wait.

    rank_state.py   what each rank leaves while it runs, and how it answers: where it stands, what it has called
    look.py         what is known of every rank of a folder: its answer, its process, its stack from outside
    verdict.py      the paragraph

Nothing listens: ranks and whoever asks meet in a folder of the run, and a signal that Python's `faulthandler` answers
from C reaches a rank whose interpreter does not run.
"""

from __future__ import annotations

from pathlib import Path

from everyrank.errors import describe
from everyrank.launch.autopsy.look import look_at_ranks
from everyrank.launch.autopsy.rank_state import FOLDER, RankState, current_state, keep_state
from everyrank.launch.autopsy.verdict import verdict
from everyrank.launch.stalled_ranks import concerns_others

__all__ = ["FOLDER", "RankState", "current_state", "hang_autopsy", "keep_state", "last_words"]


def hang_autopsy(folder: Path, patience_seconds: float = 5.0) -> str | None:
    """The paragraph for the ranks that leave their state in this folder; None where none has."""
    views = look_at_ranks(folder, patience_seconds)
    return verdict(views) if views else None


def last_words(error: BaseException) -> str:
    """Leave where this rank has failed, and find out whom it has waited for in vain, while all ranks still live.

    "" where the error has nothing to do with the others.
    """
    state, message = current_state(), describe(error)
    if state is None:
        return ""
    state.fail(error, message)
    return (hang_autopsy(state.folder) or "") if concerns_others(message) else ""
