"""mpi4py and its MPI: imported and initialised when the first group asks for it, finalised when this process ends."""

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

__all__ = ["load_mpi", "meet"]

_STARTED_BY = ("OMPI_", "PMIX_", "PMI_", "MPI_LOCAL", "MV2_")  # how the variables of mpirun and srun begin
_INSTALL = "pip install 'everyrank[mpi]', or load your cluster's MPI and pip install mpi4py"


def load_mpi(size: int) -> Any:
    """mpi4py's module, with MPI initialised until this process ends. Raises `CannotRunError`."""
    try:
        mpi4py: Any = import_module("mpi4py")
    except ImportError:
        raise CannotRunError(f"--backend mpi: there is no mpi4py here; {_INSTALL}") from None
    if size > 1 and not any(name.startswith(_STARTED_BY) for name in os.environ):
        raise CannotRunError(
            "--backend mpi: this process was not started by mpirun; use --launcher mpi, or mpirun -n N and the command"
        )
    if "mpi4py.MPI" not in sys.modules:  # else whoever imported it has said what it shall do
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        mpi: Any = import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise CannotRunError(f"--backend mpi: mpi4py finds no MPI ({str(error).splitlines()[0]}); {_INSTALL}") from None
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_SERIALIZED)
        atexit.register(_finalize, mpi)
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise CannotRunError("--backend mpi: this MPI allows one thread only; it has to give MPI_THREAD_SERIALIZED")
    return mpi


def _finalize(mpi: Any) -> None:
    """A collective of all processes of mpirun: not after an error, when the others are elsewhere."""
    if not UNFINISHED and getattr(sys, "last_value", None) is None and not mpi.Is_finalized():
        mpi.Finalize()


def meet(store: dist.Store, mpi: Any, rank: int, size: int, ranks: Sequence[int], seconds: float) -> list[int]:
    """The rank of each in MPI's own world, once all have come. Raises `CannotRunError` on all if these are no world."""
    world = mpi.COMM_WORLD
    store.set(f"place/{rank}", json.dumps([world.Get_rank(), world.Get_size()]))
    entries = [
        handshake(store, f"place/{group_rank}", ranks[group_rank], "MPI group", seconds) for group_rank in range(size)
    ]
    mpi_ranks, sizes = [mpi_rank for mpi_rank, _ in entries], {count for _, count in entries}
    if len(set(mpi_ranks)) < size or len(sizes) > 1:
        library = mpi.Get_library_version().partition(",")[0].splitlines()[0].strip("\0 ")
        raise CannotRunError(
            f"--backend mpi: MPI knows {min(sizes)} of {size} ranks; mpi4py uses {library}: start them by its mpirun"
        )
    return mpi_ranks
