"""Helpers for the tests of launchers: the variables that each launcher sets, and the result of a command."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from processes import only_error_line

GOLDEN = Path(__file__).parent / "golden"

# prefixes of the environment variables of launchers
LAUNCHER_PREFIXES = (
    "SLURM",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "MPI_",
    "MASTER_",
    "TORCHELASTIC_",
    "GLOO_",
    "NCCL_",
    "HOROVOD_",
)

# variables of one rank, as each launcher sets them
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}

HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4321",
}

MPICH = {"PMI_RANK": "3", "MPI_LOCALRANKID": "3", "PMI_SIZE": "5", "MPI_LOCALNRANKS": "5"}

# variables in a Slurm allocation, before srun starts ranks
SLURM_JOB = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS": "6", "SLURM_JOB_NODELIST": "n[01-02]"}

SRUN = {
    **SLURM_JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[01-02]",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


class CommandResult(NamedTuple):
    """The exit status, stdout and stderr of a command."""

    status: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """Return the only line on stderr, without the name of the program."""
        return only_error_line(self.err).removeprefix("everyrank: ").strip()


TRAIN_DDP = "train digits --layout ddp "
