"""c10d backends of ours, in Python: `shm` for ranks of one host, `mpi` for those that mpirun starts; and Horovod's.

Registered with torch where a World asks for them; every group made inside that world is one of theirs, too.

    said.py       what a rank has said in the store, while a group is made
    async_buffers.py   buffers of asynchronous collectives, filled with NaN until somebody waits for them
    queue.py       operations that come one after the other, and whom they wait for
    engine.py     operations that wait for other ranks, moved on by whoever waits
    recent.py     the newest calls, for whoever asks why a job hangs
    transport.py  what a backend has to give: a few operations on flat tensors
    group.py      c10d's calls by those: the process group that torch sees
    shm/          through memory that the ranks share
    mpi/          through any MPI, by mpi4py
    horovod.py    what Horovod has of them, to be measured beside
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from everyrank.backends.engine import recorded
from everyrank.backends.group import PythonGroup, is_observed, observe_call, observed_calls
from everyrank.backends.horovod import make_horovod_group
from everyrank.backends.mpi import make_mpi_group
from everyrank.backends.recent import RECENT_CALLS
from everyrank.backends.shm import make_shm_group, no_shared_memory

__all__ = [
    "OWN_BACKENDS",
    "RECENT_CALLS",
    "PythonGroup",
    "is_observed",
    "no_shared_memory",
    "observe_call",
    "observed_calls",
    "recorded",
    "register_backend",
]

OWN_BACKENDS = {"shm": make_shm_group, "mpi": make_mpi_group, "horovod": make_horovod_group}
_TORCH_NAMES = {"mpi": "everyrank_mpi"}  # torch keeps `mpi` for its own, which only a torch built with an MPI has


def register_backend(name: str) -> str:
    """The name for `init_process_group`; of a backend of ours torch is told how its groups are made, too."""
    if name not in OWN_BACKENDS:
        return name

    def make(options: Any, _: Any) -> PythonGroup:
        # of the default group torch gives no list
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        return OWN_BACKENDS[name](
            options.store, options.group_rank, options.group_size, ranks, options.timeout, options.group_id
        )

    torch_name = _TORCH_NAMES.get(name, name)
    # From torch 2.15 on, each group gets a flight recorder hook, which looks for a C++ backend inside the group. Ours
    # has none, and keeps its own recent calls for the autopsy.
    getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set[str]()).add(torch_name)
    dist.Backend.register_backend(torch_name, make, extended_api=True, devices=["cpu"])
    return torch_name
