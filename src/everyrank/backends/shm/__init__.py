"""Backend `shm`: collectives and messages through memory that the ranks of one host share.

segment.py       the memory, and whether the others live
calls.py         what a rank calls, as one number
chunks.py        flat tensors in chunks
phases.py        all ranks of a group: buffers and counters
collectives.py   the collectives over these
messages.py      between two ranks: rings of entries
group.py         all of it together: the group that torch sees
"""

from everyrank.backends.shm.group import make_shm_group
from everyrank.backends.shm.segment import no_shared_memory

__all__ = ["make_shm_group", "no_shared_memory"]
