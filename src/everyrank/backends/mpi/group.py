"""A communicator for the ranks of a group, and the group that torch sees."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch.distributed as dist

from everyrank.backends.engine import ENGINE
from everyrank.backends.group import PythonGroup
from everyrank.backends.mpi.calls import UNFINISHED, Calls
from everyrank.backends.mpi.collectives import MpiCollectives
from everyrank.backends.mpi.library import load_mpi, meet
from everyrank.backends.mpi.messages import MpiMessages
from everyrank.backends.mpi.wait_table import WaitTable
from everyrank.backends.operation_queue import OperationQueue
from everyrank.backends.transport import Transport

__all__ = ["make_mpi_group"]


def make_mpi_group(
    store: dist.Store, rank: int, size: int, ranks: Sequence[int], timeout: datetime.timedelta, name: str
) -> PythonGroup:
    """A process group over MPI. A collective of its ranks; `ranks` are their numbers among all ranks.

    Raises `CannotRunError` where there is no mpi4py, or mpirun has not started these ranks, and `RankFailedError` that
    names who does not come.
    """
    mpi, seconds = load_mpi(size), timeout.total_seconds()
    places = meet(store, mpi, rank, size, ranks, seconds)
    with ENGINE.lock:  # all are there: it does not wait long
        members = mpi.COMM_WORLD.Get_group().Incl(places)
        communicator = mpi.COMM_WORLD.Create_group(members)
        members.Free()

    def close() -> None:
        if not UNFINISHED and not mpi.Is_finalized():
            with ENGINE.lock:
                communicator.Free()

    calls, wait_table = Calls(mpi, communicator), WaitTable(store, rank, ranks)
    transport = Transport(
        "mpi",
        MpiCollectives(calls, rank, size, wait_table),
        MpiMessages(calls, rank, size, ranks, seconds),
        OperationQueue(ranks, seconds, wait_table.lost),
        close,
    )
    return PythonGroup(transport, rank, size, name)
