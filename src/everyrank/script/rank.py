"""Runs the script as one rank, with torchrun's environment variables and with the autopsy."""

from __future__ import annotations

import atexit
import dataclasses
import os
import signal
import sys
import threading
import traceback

from everyrank.errors import RankFailedError, is_user_code
from everyrank.launch import RankInfo
from everyrank.script.command import UserScript
from everyrank.script.variables import rank_variables
from everyrank.script.watching import watch

__all__ = ["run_script_rank"]

_EXIT_SECONDS = 10.0


def run_script_rank(
    info: RankInfo, command: UserScript, timeout_seconds: float, unset: tuple[str, ...], restart_count: int = 0
) -> None:
    """Run the script in this process as one rank of a job.

    timeout_seconds   time after which a rank that waits for others prints the autopsy
    unset             variables that everyrank set for its ranks, to be hidden from the script
    restart_count     how often everyrank has started all ranks again

    Raises what the script raises, and `RankFailedError` if the script exits with a status other than 0.
    """
    for name in unset:
        if name != "OMP_NUM_THREADS" or info.local_size == 1:  # torchrun also sets it for several ranks
            os.environ.pop(name, None)
    if info.started_by != "torchrun":
        info = dataclasses.replace(info, restart_count=info.restart_count + restart_count)
        os.environ.update(rank_variables(info, timeout_seconds))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore  (a rank that is killed loses no line)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    watch(info, timeout_seconds)
    try:
        _run(command)
    except BaseException as error:
        _run_exit_functions(info, error)
        raise
    threading._shutdown()  # pyright: ignore  (wait for the script's threads, as Python does at exit)


def _run(command: UserScript) -> None:
    """Run the script. An exception is passed to the hook of the script or of a library."""
    try:
        command.run()
    except SystemExit as error:
        _check_status(error)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__  # as Python does
        hook = sys.excepthook  # the hook of the script or a library; torch's hook repeats the log
        if hook is not sys.__excepthook__ and not getattr(hook, "__module__", "").startswith("torch."):
            hook(type(error), error, error.__traceback__)
        raise


def _run_exit_functions(info: RankInfo, error: BaseException) -> None:
    """Run the exit functions of a script that has failed, which for example delete its temporary folders.

    If they wait for other ranks, the error is reported after `_EXIT_SECONDS`, and this process ends.
    """
    timer = threading.Timer(_EXIT_SECONDS, info.fail or (lambda _: None), (error,))
    timer.daemon = True
    timer.start()
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    timer.cancel()


def _check_status(error: SystemExit) -> None:
    """Raise `RankFailedError` for a status other than 0."""
    if error.code is None:
        return
    if isinstance(error.code, int):
        status, detail = error.code & 0xFF, ""  # the part that a parent process gets
    else:
        status, detail = 1, f": {error.code}"
        print(error.code, file=sys.stderr)
    if status == 0:
        return
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)]
    location = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}: " if frames else ""  # noqa: PTH119
    raise RankFailedError(f"{location}exited with status {status}{detail}") from error
