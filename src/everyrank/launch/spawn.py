"""spawn: one command per rank on this host. They meet over a file, so no port is opened and none can collide."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["render"]


def render(directory: Path, processes: int) -> list[list[str]]:
    """The argv of each process, by rank."""
    return [[sys.executable, "-m", "everyrank.launch.worker", str(directory), str(rank)] for rank in range(processes)]
