"""One task on each node, which starts the ranks of that node (`--launcher slurm --per-node spawn`).

`python -P -m everyrank.launch.node LAUNCHER COUNT JOB_FOLDER`

Rank = node x COUNT + local rank. Slurm's variables tell which node this is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from everyrank.launch.environments import rank_info_from_environment
from everyrank.launch.job import Launch, starts_supervisors

__all__ = ["main"]

_GRACE_SECONDS = 3.0  # after the first failure, so that other ranks can report theirs


def main() -> int:
    """Run the ranks of this node. Returns 0 if all succeeded, else the exit status of the first that failed."""
    name, count, job_folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    task = rank_info_from_environment(os.environ)
    assert task is not None, "srun sets the environment of its tasks"
    launch = Launch(
        name,
        processes=task.size * count,
        nodes=task.size,
        node_rank=task.rank,
        rendezvous=task.rendezvous_url.removeprefix("tcp://") if task.size > 1 else None,
    )
    assert launch.row.launch_per_node, f"{name} starts no ranks of one node"
    commands = launch.row.commands(launch, job_folder)
    if starts_supervisors(commands):
        return _run(commands)
    [command] = commands
    return os.execv(command[0], command)  # noqa: S606  (replaces this process)


def _run(commands: list[list[str]]) -> int:
    """Start all commands and wait for them; when one fails, end the others."""
    processes = [subprocess.Popen(command) for command in commands]

    def forward(number: int, _: FrameType | None) -> None:
        for process in processes:
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, forward)
    while any(process.poll() is None for process in processes):
        failed = [code for process in processes if (code := process.poll())]
        if failed:
            time.sleep(_GRACE_SECONDS)
            for process in processes:
                process.kill()
            return _status(failed[0])
        time.sleep(0.1)
    return next((_status(process.returncode) for process in processes if process.returncode), 0)


def _status(code: int) -> int:
    """Return the exit status of a shell for a return code of `Popen`: 128 + N after signal N."""
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
