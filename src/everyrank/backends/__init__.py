"""c10d backends in Python: `shm` for the ranks of one host, `mpi` for ranks of mpirun, and Horovod.

`open_world` registers the requested backend with torch, and all groups of that world then use it.

    handshake.py        waits for another rank's entry in the store while a group is made
    async_buffers.py    fills the buffers of asynchronous collectives with NaN until `wait()`
    operation_queue.py  the operations of a group that run one after the other
    engine.py           runs all pending operations, in the waiting thread or in a background thread
    recent.py           a ring buffer of the newest calls, to explain hangs and stragglers
    transport.py        the interface of a backend: collectives and messages of flat tensors
    group.py            PythonGroup: the process group that torch sees, over a transport
    shm/                collectives, send and receive over shared memory
    mpi/                collectives, send and receive over MPI, with mpi4py
    horovod.py          the collectives of Horovod, for `everyrank comm`
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from everyrank.backends.engine import profiler_range
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
    "profiler_range",
    "register_backend",
]

OWN_BACKENDS = {"shm": make_shm_group, "mpi": make_mpi_group, "horovod": make_horovod_group}
_TORCH_NAMES = {"mpi": "everyrank_mpi"}  # `mpi` is reserved for torch's own backend, which needs a torch built with MPI


def register_backend(name: str) -> str:
    """Register a backend of everyrank with torch, and return its name for `init_process_group`.

    The names of other backends, such as "gloo", are returned unchanged.
    """
    if name not in OWN_BACKENDS:
        return name

    def make_group(options: Any, _: Any) -> PythonGroup:
        # torch passes no ranks for the default group
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        return OWN_BACKENDS[name](
            options.store, options.group_rank, options.group_size, ranks, options.timeout, options.group_id
        )

    torch_name = _TORCH_NAMES.get(name, name)
    # From torch 2.15 on, each group gets a flight recorder hook, which looks for a C++ backend inside the group. These
    # groups have none. So they get no hook, and RECENT_CALLS records their calls instead.
    getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set[str]()).add(torch_name)
    dist.Backend.register_backend(torch_name, make_group, extended_api=True, devices=["cpu"])
    return torch_name
