"""spawn: one command for each rank of this host, with its place in words. Nothing of a launcher stands between."""

from __future__ import annotations

import sys
from pathlib import Path

from everyrank.launch.job import Launch

__all__ = ["PYTHON", "WORKER", "render"]

PYTHON = (sys.executable, "-P")  # without the current folder, in which others may have left a json.py
WORKER = (*PYTHON, "-m", "everyrank.launch.worker")


def render(launch: Launch, directory: Path) -> list[list[str]]:
    """The argv of each process on this host. rank = node rank x ranks of a node + local rank."""
    here = launch.processes_per_node
    first = (launch.node_rank or 0) * here
    return [[*WORKER, str(directory), str(first + local), str(local), str(here)] for local in range(here)]
