"""Starts the script on all ranks, passes signals on to it, and starts it again after a failure."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Generator
from types import FrameType
from typing import Any

from everyrank.errors import CannotRunError, EveryrankError, UsageError, printable
from everyrank.launch import Launch, Stop, rank_info_from_environment, run_ranks
from everyrank.launch.host_info import host_name
from everyrank.measure.resource_log import resource_log
from everyrank.script.command import UserScript, can_preload_torch, imports_horovod

__all__ = ["ScriptOptions", "launch_script"]

_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_EVERYRANK_VARIABLES = ("OMP_NUM_THREADS", "TTY_COMPATIBLE", _LOG_LEVEL)
"""Variables that everyrank sets for ranks if the user has not set them."""


@dataclasses.dataclass(frozen=True)
class ScriptOptions:
    """Options of `launch_script`.

    restarts        how often all ranks are started again after a failure, if the launcher does not do this
    grace_seconds   time for ranks to end after a signal was passed on to them
    """

    restarts: int = 0
    grace_seconds: float = 30.0


def launch_script(launch: Launch, command: UserScript, options: ScriptOptions | None = None) -> int:
    """Run the script on all ranks. Returns the exit status: 0, or 128 + N after signal N.

    For example `launch_script(Launch("torchrun", processes=4), read_command(["train.py"]))`.

    Rank 0 writes to the terminal, and the others to files in `launch.logs`. SIGINT, SIGTERM, SIGHUP and SIGUSR1 are
    passed on to all ranks; a second SIGINT or SIGTERM ends them at once. SIGUSR2 prints the autopsy.

    Raises the root cause of a failure as `RankFailedError`.
    """
    options = options or ScriptOptions()
    if rank_info_from_environment(os.environ) is not None:  # an external launcher has started this rank
        run_ranks(launch, "everyrank.script.rank:run_script_rank", command, launch.timeout_seconds, ())
        return 0
    if launch.processes > 1 and not launch.row.starts_horovod and imports_horovod(command):
        _say(
            f"{command.name} imports Horovod, which cannot find other ranks under --launcher {launch.launcher}; "
            "type --launcher horovodrun"
        )
    unset = tuple(name for name in _EVERYRANK_VARIABLES if name not in os.environ)
    os.environ.setdefault(_LOG_LEVEL, "WARNING")  # torch's default, so that the script's warnings appear
    try:
        for restart in range(options.restarts + 1):
            status = _attempt(launch, command, options, unset, restart)
            if status is not None:
                return status
    finally:
        if _LOG_LEVEL in unset:
            os.environ.pop(_LOG_LEVEL, None)
    raise AssertionError


def _attempt(
    launch: Launch, command: UserScript, options: ScriptOptions, unset: tuple[str, ...], restart: int
) -> int | None:
    """Start all ranks once. Returns the exit status, or None if they should be started again."""
    module = _module_of_ranks(launch, command)
    resources = None
    if launch.logs is not None:
        launch.logs.mkdir(parents=True, exist_ok=True)
        resources = launch.logs / "resources.csv"
    arguments = (command, launch.timeout_seconds, unset, restart)
    with _forwarded_signals(options.grace_seconds) as stop, resource_log(resources, host_name(), restart > 0):
        try:
            run_ranks(launch, f"everyrank.script.{module}:run_script_rank", *arguments, stop=stop)
        except (UsageError, CannotRunError):
            raise
        except EveryrankError as error:
            if stop.asked not in (None, signal.SIGUSR1):
                _say(f"{stop.asked.name} was passed on to all ranks: {error}")
            elif restart == options.restarts:
                raise
            else:
                _say(f"{error}; starting all ranks again ({restart + 1} of {options.restarts})")
                return None
        return 0 if stop.asked in (None, signal.SIGUSR1) else 128 + int(stop.asked)


def _module_of_ranks(launch: Launch, command: UserScript) -> str:
    """Return the module whose function the ranks call: preloaded, if a fork server imports torch once for several.

    Torch reads OMP_NUM_THREADS when it is imported. It is 1 then, which is wrong for the only rank of a host.
    """
    has_fork_server = launch.rank_launcher.launch_per_node and launch.processes_per_node > 1
    return "preloaded" if has_fork_server and can_preload_torch(command) else "rank"


def _say(text: str) -> None:
    print(f"everyrank: {printable(text)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _forwarded_signals(grace_seconds: float) -> Generator[Stop]:
    """Record a signal in the `Stop`, which passes it on to all ranks. A second signal has its previous effect."""
    stop = Stop(grace_seconds=grace_seconds)
    previous_handlers: dict[int, Any] = {}

    def record(number: int, frame: FrameType | None) -> None:
        if stop.asked in (None, signal.SIGUSR1):
            stop.asked, stop.count = signal.Signals(number), stop.count + 1
        elif number != signal.SIGUSR1:
            previous = previous_handlers[number]
            if callable(previous):
                previous(number, frame)
            raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        previous = signal.getsignal(number)
        if previous is not signal.SIG_IGN:  # SIG_IGN: SIGHUP under nohup
            previous_handlers[number] = signal.signal(number, record)
    try:
        yield stop
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)
