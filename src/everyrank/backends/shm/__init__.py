"""Backend `shm`: collectives and messages through memory that the ranks of one host share.

segment.py       the memory, and whether the others live
collectives.py   all ranks of a group: slots and counters
messages.py      between two ranks: rings of cells
transport.py     the three together: what a group of torch is made of
"""

from everyrank.backends.shm.group import make_shm_group
from everyrank.backends.shm.segment import no_shared_memory

__all__ = ["make_shm_group", "no_shared_memory"]
