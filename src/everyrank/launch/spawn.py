"""spawn: a fork server on this host imports torch once and forks all ranks of the host.

A single rank is started as a separate process, and so is every rank if fork is not safe.
"""

from __future__ import annotations

import sys
from pathlib import Path

from everyrank.launch.job import FORK_SERVER, WORKER, Launch
from everyrank.launch.launcher import Launcher

__all__ = ["LAUNCHER"]


class Spawn(Launcher):
    """Starts the ranks of this host. Rank = node rank x ranks of a node + local rank."""

    name = "spawn"
    supports_nodes = True
    launch_per_node = True

    def commands(self, launch: Launch, job_folder: Path) -> list[list[str]]:
        """One fork server, or one command for each rank of this node."""
        count = launch.processes_per_node
        first_rank = (launch.node_rank or 0) * count
        if count > 1 and _can_fork():
            return [[*FORK_SERVER, str(job_folder), str(first_rank), str(count)]]
        return [
            [*WORKER, str(job_folder), str(first_rank + local_rank), str(local_rank), str(count)]
            for local_rank in range(count)
        ]

    def find(self) -> str:
        """Always available."""
        return "comes with everyrank"


def _can_fork() -> bool:
    return sys.platform == "linux"  # system libraries of macOS do not work after a fork


LAUNCHER = Spawn()
