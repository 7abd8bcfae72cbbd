"""Backend `mpi`: collectives and messages over any MPI, through mpi4py. Nothing of torch has to be built for it.

Each call of c10d becomes non-blocking calls of MPI (MPI_Iallreduce, MPI_Isend), which are then asked whether they are
done: never one that waits, so messages both ways and operations of several groups are under way in any order. A group
is a communicator of its own. All calls are made under the engine's lock: MPI_THREAD_SERIALIZED is enough.

    library.py       mpi4py and its MPI, and whether mpirun has started these ranks
    calls.py         memory as MPI takes it; asking until a call is done
    collectives.py   all ranks of a group, after they agreed what they call
    wait_table.py   who is missing, and what the others call: in the store, because MPI does not say
    messages.py      between two ranks
    group.py         all of these together: what a group of torch is made of
"""

from everyrank.backends.mpi.group import make_mpi_group

__all__ = ["make_mpi_group"]
