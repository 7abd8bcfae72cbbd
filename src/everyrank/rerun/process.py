"""Imports torch once, then forks the ranks of each run that is requested on standard input."""

from __future__ import annotations

import sys

if __name__ == "__main__":  # redirect files before any other import can copy `open`
    import os

    from everyrank.audit.watch.overlay import install_overlay

    OVERLAY = install_overlay(sys.argv[1], sys.argv[2])
    REPLIES = os.dup(1)
    os.dup2(2, 1)  # what a module prints when it is imported must not mix with the replies

import contextlib
import faulthandler
import importlib
import json
import os
import re
import signal
import socket
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch

from everyrank.audit.start import IDLE_SHARE, cpu_seconds_of

# most scripts need these modules, and a fork shares them
for _module in (
    "torch.distributed.fsdp",
    "torch.nn.parallel.distributed",
    "torch.optim",
    "torch.utils.data",
    "torch._dynamo",
    "everyrank.rerun.inside",
    *(sys.argv[3:] if __name__ == "__main__" else []),
):
    importlib.import_module(_module)

_AFTER_FAILURE_SECONDS = 5.0  # for the other ranks to fail, too, perhaps with a better error
_IDLE_SECONDS = 60.0  # ranks that use no CPU for so long wait for each other
_STACK_SECONDS = 0.5  # for the ranks to write their stacks


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _run(settings: dict[str, Any]) -> dict[str, str]:
    """Run the ranks, and run them again if another program has taken their port."""
    result = _run_once(settings)
    for _ in range(2):
        if "EADDRINUSE" not in result["failure"]:
            break
        for path in Path(settings["folder"]).iterdir():
            if path.is_file():
                path.unlink()
        result = _run_once(settings)
    return result


def _run_once(settings: dict[str, Any]) -> dict[str, str]:
    """Fork the ranks, wait for them, and return why one failed."""
    port = _free_port()
    processes: dict[int, int] = {}
    for rank in range(settings["ranks"]):
        process = os.fork()
        if not process:
            _run_as_rank(settings, rank, port)
        processes[process] = rank
    codes, no_end = _wait(processes, settings["timeout"])
    running = {process: rank for process, rank in processes.items() if process not in codes}
    has_failed = any(codes.values())  # then the others are of no interest
    stopped_at = [] if has_failed else _stopped_at(Path(settings["folder"]), running, settings["main"])
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process, signal.SIGKILL)
        if process not in codes:
            os.waitpid(process, 0)
    errors = sorted(Path(settings["folder"]).glob("error*"), key=lambda path: path.stat().st_mtime)
    first_traceback = errors[0].read_text(encoding="utf-8", errors="replace") if errors else ""
    if errors:
        failure = f"rank {errors[0].name.removeprefix('error')}: {_error_line(first_traceback)}"
    elif has_failed:
        failed_process = next(process for process in codes if codes[process])
        failure = f"rank {processes[failed_process]} ended with status {codes[failed_process]}"
    else:
        failure = "; ".join([no_end, *stopped_at]) if running else ""
    return {"failure": failure[:500], "traceback": first_traceback[-8000:]}


def _error_line(text: str) -> str:
    """Return the line with the exception of a traceback: its message may have more lines, which mean little alone."""
    lines = text.strip().splitlines() or ["an error that could not be written"]
    last_frame = max((index for index, line in enumerate(lines) if line.startswith("  File ")), default=-1)
    return next((line for line in lines[last_frame + 1 :] if not line.startswith(" ") and line), lines[-1])


def _wait(processes: dict[int, int], timeout_seconds: float) -> tuple[dict[int, int], str]:
    """Return the exit statuses of the ranks that have ended, and why the others are not waited for any longer.

    After a failure, the others have a few seconds.
    """
    deadline, codes = time.monotonic() + timeout_seconds, dict[int, int]()
    progress_time, cpu_seconds, next_look = time.monotonic(), 0.0, time.monotonic() + 1.0
    while len(codes) < len(processes) and time.monotonic() < deadline:
        now = time.monotonic()
        if now > next_look:  # it reads the list of all processes
            next_look = now + 1.0
            cpu_seconds_now = cpu_seconds_of(set(processes) - set(codes))
            # less if a process has ended
            if not cpu_seconds <= cpu_seconds_now <= cpu_seconds + IDLE_SHARE * (now - progress_time):
                progress_time, cpu_seconds = now, cpu_seconds_now
            elif now > progress_time + _IDLE_SECONDS:
                return codes, f"no end, and no rank has used the CPU for {_IDLE_SECONDS:g} s"
        for process in set(processes) - set(codes):
            ended_process, status = os.waitpid(process, os.WNOHANG)
            if ended_process:
                codes[process] = os.waitstatus_to_exitcode(status)
                if codes[process]:
                    deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_SECONDS)
        time.sleep(0.02)
    return codes, f"no end within {timeout_seconds:g} s"


def _stopped_at(folder: Path, running: dict[int, int], main: str) -> list[str]:
    """Return the line of the script that each running rank is at, such as "rank 0 is at train.py:20"."""
    for process in running:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGUSR1)
    time.sleep(_STACK_SECONDS if running else 0.0)
    texts: list[str] = []
    for rank in running.values():
        with contextlib.suppress(OSError):
            frames = re.findall(r'File "(.+)", line (\d+)', (folder / f"stack{rank}").read_text(errors="replace"))
            of_script = [(name, line) for name, line in frames if Path(name).parent == Path(main).parent]
            texts += [f"rank {rank} is at {Path(name).name}:{line}" for name, line in of_script[:1]]
    return texts


def _run_as_rank(settings: dict[str, Any], rank: int, port: int) -> NoReturn:
    """Run the script as one rank, in this forked process."""
    os.setsid()
    folder = Path(settings["folder"])
    # a new overlay for this rank, without the files of an earlier run
    OVERLAY.__init__(str(folder), settings["main"])
    log_file = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log_file, 1)
    os.dup2(log_file, 2)
    num_ranks = settings["ranks"]
    os.environ.update(settings["environment"])
    rank_variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "GROUP_RANK": 0,
    }
    os.environ.update({name: str(value) for name, value in rank_variables.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="everyrank")
    faulthandler.register(signal.SIGUSR1, (folder / f"stack{rank}").open("w"), all_threads=False)
    exit_code = 0
    try:
        from everyrank.rerun.inside import run_as_rank

        run_as_rank(settings, rank, OVERLAY)
    except SystemExit as error:
        exit_code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # any error of the script
        exit_code = 1
        with contextlib.suppress(OSError):
            text = traceback.format_exc()
            # a file name that is not UTF-8 has surrogates, which UTF-8 does not encode
            (folder / f"error{rank}").write_text(text, encoding="utf-8", errors="backslashreplace")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(exit_code)


def _main() -> None:
    torch.set_num_threads(1)
    replies = os.fdopen(REPLIES, "w")
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    _main()
