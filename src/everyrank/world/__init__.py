"""Inside one process: rank, device, process group, threads. Opened once, closed cleanly.

    with open_world(info, launch) as world:
        ...

A world of one has the same interface. Every wait here has a timeout that names who was missing.

    world.py           World, and what is chosen for it: device, backend, threads
    group_of_one.py    a default process group with only this rank, for what one rank does alone
    barrier.py         who waits for whom, over the store
    collectives.py     sums and gathers of small tensors, outside the timed steps
    rendezvous.py      the store that all ranks share, by each init method
    heartbeat.py       who the other ranks are, whether they still live, which failed first
    calls.py           which collectives this rank has called, for whoever asks why a job hangs
    process_group.py   open_world: where a process group is made, and ended
    horovod.py         Horovod beside it, with the same ranks
"""

from everyrank.world.barrier import (
    broadcast_text,
    do_all_ranks_agree,
    from_rank_0,
    on_each_rank,
    on_rank_0,
    store_barrier,
)
from everyrank.world.group_of_one import group_of_one
from everyrank.world.horovod import import_horovod, start_horovod, wait_for_horovod
from everyrank.world.process_group import end_of_start, open_world
from everyrank.world.world import (
    World,
    choose_backend,
    choose_device,
    choose_threads,
    single_process_world,
    use_threads,
)

__all__ = [
    "World",
    "broadcast_text",
    "choose_backend",
    "choose_device",
    "choose_threads",
    "do_all_ranks_agree",
    "end_of_start",
    "from_rank_0",
    "group_of_one",
    "import_horovod",
    "on_each_rank",
    "on_rank_0",
    "open_world",
    "single_process_world",
    "start_horovod",
    "store_barrier",
    "use_threads",
    "wait_for_horovod",
]
