"""Makes the communicator of a group, and its process group for torch."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch.distributed as dist

from everyrank.backends.engine import ENGINE
from everyrank.backends.group import PythonGroup
from everyrank.backends.mpi.calls import UNFINISHED, Calls
from everyrank.backends.mpi.collectives import MpiCollectives
from everyrank.backends.mpi.library import gather_mpi_ranks, load_mpi
from everyrank.backends.mpi.messages import MpiMessages
from everyrank.backends.mpi.wait_table import WaitTable
from everyrank.backends.operation_queue import OperationQueue
from everyrank.backends.transport import Transport

__all__ = ["make_mpi_group"]


def make_mpi_group(
    store: dist.Store, rank: int, size: int, ranks: Sequence[int], timeout: datetime.timedelta, name: str
) -> PythonGroup:
    """Return a process group over MPI. A collective of its ranks, whose global ranks are `ranks`.

    Raises `CannotRunError` if mpi4py is missing or mpirun has not started these ranks, and `RankFailedError` naming a
    rank that does not arrive.
    """
    mpi, timeout_seconds = load_mpi(size), timeout.total_seconds()
    mpi_ranks = gather_mpi_ranks(store, mpi, rank, size, ranks, timeout_seconds)
    with ENGINE.lock:  # all ranks are here, so this call, which blocks, is short
        mpi_group = mpi.COMM_WORLD.Get_group().Incl(mpi_ranks)
        communicator = mpi.COMM_WORLD.Create_group(mpi_group)
        mpi_group.Free()

    def close() -> None:
        if not UNFINISHED and not mpi.Is_finalized():
            with ENGINE.lock:
                communicator.Free()

    calls, wait_table = Calls(mpi, communicator), WaitTable(store, rank, ranks)
    queue = OperationQueue(ranks, timeout_seconds, wait_table.update_missing)
    transport = Transport(
        "mpi",
        MpiCollectives(calls, rank, size, wait_table),
        MpiMessages(calls, rank, size, queue),
        queue,
        close,
    )
    return PythonGroup(transport, rank, size, name)
