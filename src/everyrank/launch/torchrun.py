"""torchrun: PyTorch's own launcher starts the ranks and tells each of them its facts in the environment."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["render"]


def render(directory: Path, processes: int) -> list[list[str]]:
    """One argv: torchrun, with a port of its own choosing. Its store, unlike all else, is open on every interface."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [[*command, "-m", "everyrank.launch.worker", str(directory)]]
