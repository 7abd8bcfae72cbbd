"""What the tests of launching share: environments of each launcher, and a command as it ended."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from processes import only_error_line

GOLDEN = Path(__file__).parent / "golden"

OF_LAUNCHERS = ("SLURM", "OMPI_", "PMI_", "PMIX_", "MPI_", "MASTER_", "TORCHELASTIC_", "GLOO_", "NCCL_", "HOROVOD_")

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

JOB = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS": "6", "SLURM_JOB_NODELIST": "n[01-02]"}

SRUN = {
    **JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[01-02]",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


class Typed(NamedTuple):
    """How a command ended, and what was said."""

    status: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The only line on stderr."""
        return only_error_line(self.err).removeprefix("everyrank: ").strip()


DDP = "train digits --layout ddp "
