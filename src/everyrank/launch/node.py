"""One task on each node, which starts the ranks there.

`python -P -m everyrank.launch.node LAUNCHER COUNT DIRECTORY`

rank = node x COUNT + local rank. Slurm says which node this is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import FrameType

from everyrank.launch.environments import rank_info_from_environment
from everyrank.launch.launcher import launcher_named

__all__ = ["main"]

_GRACE_SECONDS = 3.0  # after the first failure, for the others to say what they saw


def main() -> int:
    """0 when all ranks of this node ended well; else the status of the first that did not."""
    launcher, count, directory = launcher_named(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    task = rank_info_from_environment(os.environ)
    assert task is not None, "srun sets the environment of its tasks"
    assert launcher.render_on_node is not None, f"{launcher.name} starts no ranks of one node"
    commands = launcher.render_on_node(task, count, directory)
    if launcher.starts_supervisors:
        return _start(commands)
    [command] = commands
    return os.execv(command[0], command)  # noqa: S606  (takes the place of this process)


def _start(commands: list[list[str]]) -> int:
    """Start all, and wait; one that fails ends the others."""
    started = [subprocess.Popen(command) for command in commands]

    def pass_on(number: int, _: FrameType | None) -> None:
        for process in started:
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, pass_on)
    while any(process.poll() is None for process in started):
        failed = [code for process in started if (code := process.poll())]
        if failed:
            time.sleep(_GRACE_SECONDS)
            for process in started:
                process.kill()
            return 128 - failed[0] if failed[0] < 0 else failed[0]
        time.sleep(0.1)
    codes = [process.returncode for process in started if process.returncode]
    return 0 if not codes else 128 - codes[0] if codes[0] < 0 else codes[0]


if __name__ == "__main__":
    sys.exit(main())
