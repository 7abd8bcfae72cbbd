"""spawn: a fork server for the ranks of this host, which has imported torch once for all of them.

One rank, and each rank where forks are not safe, is a command with its place in words. Nothing of a launcher stands
between.
"""

from __future__ import annotations

import sys
from pathlib import Path

from everyrank.launch.job import FORK_SERVER, WORKER, Launch
from everyrank.launch.launcher import Launcher
from everyrank.launch.rank_info import RankInfo

__all__ = ["LAUNCHER", "render"]


def render(launch: Launch, directory: Path) -> list[list[str]]:
    """The argv of each process on this host."""
    return _on_node(launch.node_rank or 0, launch.processes_per_node, str(directory))


def _on_node(node: int, count: int, directory: str) -> list[list[str]]:
    """Rank = node rank x ranks of a node + local rank."""
    first = node * count
    if count > 1 and _can_fork():
        return [[*FORK_SERVER, directory, str(first), str(count)]]
    return [[*WORKER, directory, str(first + local), str(local), str(count)] for local in range(count)]


def _can_fork() -> bool:
    return sys.platform == "linux"  # a Mac's frameworks do not survive a fork


def _render_on_node(task: RankInfo, count: int, directory: str) -> list[list[str]]:
    return _on_node(task.rank, count, directory)


def _rendezvous(directory: Path) -> str:
    return (directory / "rendezvous").absolute().as_uri()  # a file: no port is opened, and none can collide


LAUNCHER = Launcher(
    name="spawn",
    render=render,
    find=lambda: "comes with everyrank",
    default_rendezvous=_rendezvous,
    render_on_node=_render_on_node,
    takes_arguments=False,
    one_command_per_host=True,
    starts_supervisors=True,
)
