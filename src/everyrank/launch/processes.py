"""Function in, results by rank out: in processes that are started here, or in this one where it is a rank itself.

Results and errors come back through files in a directory that only this user can open.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from everyrank.errors import CannotRunError, EveryrankError, RankFailedError, StoppedError, UsageError, describe
from everyrank.launch.facts import RankFacts, facts_from_environment
from everyrank.launch.job import Job, Launch
from everyrank.launch.ranks import Ranks
from everyrank.launch.stop import Stop

__all__ = ["run"]


def run(launch: Launch, function: Callable[..., Any], *arguments: Any, stop: Stop | None = None) -> dict[int, Any]:
    """Call `function(facts, *arguments)` in every rank; its results by rank.

    Functions of a notebook or a script are sent by value. Where this process was itself started as a rank (by
    torchrun), the function is called here and the result is that of this rank alone. When `stop` is asked, the ranks
    are: they get SIGUSR1 until they end by themselves; where this is the rank, the function gets `stop` at the end.

    Raises the error of the rank that failed first, labelled with it; the other ranks are ended within five seconds.
    """
    facts = facts_from_environment(os.environ)
    if facts is not None:
        return {facts.rank: _call_here(facts, function, (*arguments, stop) if stop is not None else arguments)}
    directory = _temporary_folder("everyrank-")
    logs = launch.logs or _temporary_folder("everyrank-logs-")
    keep_logs = launch.logs is not None
    try:
        logs.mkdir(parents=True, exist_ok=True)
        payload = cloudpickle.dumps((function, arguments))
        job = Job(payload, list(sys.path), launch.processes, os.getpid(), logs.absolute())
        (directory / "job.pickle").write_bytes(pickle.dumps(job))
        with Ranks(launch, directory, logs, stop) as ranks:
            ranks.wait()
        return ranks.results()
    except EveryrankError as error:
        keep_logs = keep_logs or error.log is not None
        raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if not keep_logs:
            shutil.rmtree(logs, ignore_errors=True)


def _call_here(facts: RankFacts, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call it in this rank, which somebody else started; an error of its own gets a label and a log."""
    try:
        return function(facts, *arguments)
    except (UsageError, StoppedError):
        raise
    except Exception as error:
        logs = _temporary_folder("everyrank-logs-")
        log = logs / f"rank{facts.rank}.log"
        log.write_text("".join(traceback.format_exception(error)))
        kind = type(error) if isinstance(error, EveryrankError) else RankFailedError
        raise kind(f"rank {facts.rank} of {facts.size}: {describe(error)}", log) from error


def _temporary_folder(prefix: str) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise CannotRunError(
            f"no folder for temporary files: {error}; set TMPDIR to one that can be written"
        ) from error
