"""The process group of one rank: its device, backend, threads and store. `open_world` makes it and ends it.

    with open_world(info, launch) as world:
        ...

A world with one rank has the same interface. Every wait has a timeout, and its error names the missing ranks.

    world.py           World: rank, size, device, backend and threads, and how they are chosen
    group_of_one.py    a default process group with only this rank, while it works without the others
    barrier.py         barriers and broadcasts over the store, which name the missing ranks
    same_value.py      a value that has to be the same on some ranks, compared when it changes
    collectives.py     all-reduce, all-gather and broadcast of small values, outside the timed steps
    rendezvous.py      opens the store that all ranks share, for each init method
    heartbeat.py       registers the ranks, monitors their heartbeats, finds which failed first
    calls.py           the collectives that this rank has called, for the report of a hang
    process_group.py   open_world: makes the process group and destroys it
    horovod.py         starts Horovod with the same ranks
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
from everyrank.world.same_value import SameValue
from everyrank.world.world import (
    World,
    choose_backend,
    choose_device,
    choose_threads,
    single_process_world,
    use_threads,
)

__all__ = [
    "SameValue",
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
