"""Loads mpi4py and its MPI library: initialised for the first group, finalised when this process ends."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch.distributed as dist

from everyrank.backends.handshake import handshake
from everyrank.backends.mpi.calls import UNFINISHED
from everyrank.errors import CannotRunError

__all__ = ["gather_mpi_ranks", "load_mpi"]

_LAUNCHER_PREFIXES = (
    "OMPI_",
    "PMIX_",
    "PMI_",
    "MPI_LOCAL",
    "MV2_",
)  # of environment variables that mpirun and srun set
_INSTALL = "pip install 'everyrank[mpi]', or load your cluster's MPI and pip install mpi4py"


def load_mpi(size: int) -> Any:
    """Return the module `mpi4py.MPI`, with MPI initialised until this process ends. Raises `CannotRunError`."""
    try:
        mpi4py: Any = import_module("mpi4py")
    except ImportError:
        raise CannotRunError(f"--backend mpi: mpi4py is not installed; {_INSTALL}") from None
    if size > 1 and not any(name.startswith(_LAUNCHER_PREFIXES) for name in os.environ):
        raise CannotRunError(
            "--backend mpi: this process was not started by mpirun; use --launcher mpi, or mpirun -n N and the command"
        )
    if "mpi4py.MPI" not in sys.modules:  # otherwise user code has imported it, and keeps its own settings
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        mpi: Any = import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise CannotRunError(
            f"--backend mpi: mpi4py finds no MPI library ({str(error).splitlines()[0]}); {_INSTALL}"
        ) from None
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_SERIALIZED)
        atexit.register(_finalize, mpi)
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise CannotRunError(
            "--backend mpi: this MPI library supports only one thread; use one with MPI_THREAD_SERIALIZED"
        )
    return mpi


def _finalize(mpi: Any) -> None:
    """Finalise MPI, but not after an error: it waits for all processes of mpirun, and the others may not come."""
    if not UNFINISHED and getattr(sys, "last_value", None) is None and not mpi.Is_finalized():
        mpi.Finalize()


def gather_mpi_ranks(
    store: dist.Store, mpi: Any, rank: int, size: int, ranks: Sequence[int], timeout_seconds: float
) -> list[int]:
    """Return the rank in MPI.COMM_WORLD of each rank of the group. A collective.

    Raises `CannotRunError` on all ranks if they are not in one MPI world.
    """
    world = mpi.COMM_WORLD
    store.set(f"mpi_rank/{rank}", json.dumps([world.Get_rank(), world.Get_size()]))
    entries = [
        handshake(store, f"mpi_rank/{group_rank}", ranks[group_rank], "MPI group", timeout_seconds)
        for group_rank in range(size)
    ]
    mpi_ranks, world_sizes = [mpi_rank for mpi_rank, _ in entries], {world_size for _, world_size in entries}
    if len(set(mpi_ranks)) < size or len(world_sizes) > 1:
        library = mpi.Get_library_version().partition(",")[0].splitlines()[0].strip("\0 ")
        raise CannotRunError(
            f"--backend mpi: MPI connects only {min(world_sizes)} of {size} ranks; start them with the mpirun of the "
            f"library that mpi4py uses, {library}"
        )
    return mpi_ranks
