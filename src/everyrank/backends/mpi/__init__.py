"""Backend `mpi`: collectives, send and receive over any MPI library, through mpi4py. Works with any build of torch.

Each operation starts non-blocking calls of MPI (MPI_Iallreduce, MPI_Isend) and polls their requests. None of them
blocks, so operations of several groups, and messages in both directions, make progress in any order. Each group has its
own communicator. All calls of MPI are made under the engine's lock, so MPI_THREAD_SERIALIZED is enough.

    library.py       loads mpi4py, and checks that mpirun has started these ranks
    calls.py         tensors as MPI buffers, and polling of MPI requests
    collectives.py   the collectives of a group, after all ranks have agreed on the call
    wait_table.py    names the missing ranks, and the calls of the others, because MPI does not report them
    messages.py      send and receive between two ranks
    group.py         makes the process group that torch sees
"""

from everyrank.backends.mpi.group import make_mpi_group

__all__ = ["make_mpi_group"]
