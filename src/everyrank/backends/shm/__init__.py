"""Backend `shm`: collectives, send and receive over shared memory, for the ranks of one host.

segment.py       maps the shared memory, and detects peers that have ended
calls.py         encodes a call as one integer
chunks.py        splits flat tensors into chunks
phases.py        synchronises the ranks of a group with double buffers and counters
collectives.py   the collectives over these buffers
messages.py      send and receive over ring buffers
group.py         makes the process group that torch sees
"""

from everyrank.backends.shm.group import make_shm_group
from everyrank.backends.shm.segment import no_shared_memory

__all__ = ["make_shm_group", "no_shared_memory"]
