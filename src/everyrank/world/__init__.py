"""Inside one process: rank, device, process group, threads. Opened once, closed cleanly.

    with open_world(facts, launch) as world:
        ...

A world of one has the same interface. Every wait here has a timeout that names who was missing.

    noun.py      World, and what is chosen for it: device, backend, threads
    stores.py    the store that all ranks share, by each init method
    meeting.py   who waits for whom
    company.py   who the others are, whether they still live, who failed first
    opening.py   open_world
"""

from everyrank.world.meeting import from_rank_0, meet, on_each_rank, on_rank_0, tell
from everyrank.world.noun import World, alone, choose_backend, choose_device, choose_threads, use_threads
from everyrank.world.opening import open_world

__all__ = [
    "World",
    "alone",
    "choose_backend",
    "choose_device",
    "choose_threads",
    "from_rank_0",
    "meet",
    "on_each_rank",
    "on_rank_0",
    "open_world",
    "tell",
    "use_threads",
]
