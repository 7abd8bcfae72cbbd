"""Imports torch once, then forks the ranks of each run that its standard input asks for."""

from __future__ import annotations

import sys

if __name__ == "__main__":  # files are redirected before anything else can import `open` under another name
    from everyrank.audit.watch.overlay import install_overlay

    OVERLAY = install_overlay(sys.argv[1], sys.argv[2])

import contextlib
import importlib
import json
import os
import signal
import socket
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch

# most scripts need these, and a fork shares them
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

_AFTER_FAILURE_SECONDS = 5.0  # the other ranks may fail by themselves, with a better reason


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run(settings: dict[str, Any]) -> dict[str, str]:
    """Run the ranks, again if another program took their port in between."""
    answer = _attempt(settings)
    for _ in range(2):
        if "EADDRINUSE" not in answer["trouble"]:
            break
        for path in Path(settings["folder"]).iterdir():
            if path.is_file():
                path.unlink()
        answer = _attempt(settings)
    return answer


def _attempt(settings: dict[str, Any]) -> dict[str, str]:
    """Fork the ranks, wait for them, and return why one failed."""
    port = _free_port()
    processes: dict[int, int] = {}
    for rank in range(settings["ranks"]):
        process = os.fork()
        if not process:
            _rank(settings, rank, port)
        processes[process] = rank
    codes = _wait(processes, settings["timeout"])
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process, signal.SIGKILL)
        if process not in codes:
            os.waitpid(process, 0)
    errors = sorted(Path(settings["folder"]).glob("error*"), key=lambda path: path.stat().st_mtime)
    text = errors[0].read_text() if errors else ""
    if errors:
        trouble = f"rank {errors[0].name.removeprefix('error')}: {text.strip().splitlines()[-1]}"
    elif any(codes.values()):
        failed = next(process for process in codes if codes[process])
        trouble = f"rank {processes[failed]} ended with status {codes[failed]}"
    else:
        trouble = f"no end within {settings['timeout']:g} s" if len(codes) < len(processes) else ""
    return {"trouble": trouble[:500], "traceback": text[-8000:]}


def _wait(processes: dict[int, int], timeout_seconds: float) -> dict[int, int]:
    """The exit statuses of the ranks that end in time; after one has failed, the others have a few seconds."""
    end, codes = time.monotonic() + timeout_seconds, dict[int, int]()
    while len(codes) < len(processes) and time.monotonic() < end:
        for process in set(processes) - set(codes):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
                if codes[process]:
                    end = min(end, time.monotonic() + _AFTER_FAILURE_SECONDS)
        time.sleep(0.02)
    return codes


def _rank(settings: dict[str, Any], rank: int, port: int) -> NoReturn:
    """Run the script as one rank, in this forked process."""
    os.setsid()
    folder = Path(settings["folder"])
    # the rank's own overlay: what an earlier run wrote is not there
    OVERLAY.__init__(str(folder), settings["main"])
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    ranks = settings["ranks"]
    os.environ.update(settings["environment"])
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="everyrank")
    code = 0
    try:
        from everyrank.rerun.inside import run_as_rank

        run_as_rank(settings, rank, OVERLAY)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # the script's own error, whatever it is
        code = 1
        with contextlib.suppress(OSError):
            (folder / f"error{rank}").write_text(traceback.format_exc())
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _main() -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not mix with the answers
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    _main()
