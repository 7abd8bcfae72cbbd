"""The mathematics of a training, and finding it by name or path.

    workload.py  `Workload`, and `Source`: where one comes from
    scan.py      which names a Python file defines, read without running it
    batch.py     a different global batch, and how the learning rate follows it
    find.py      by a built-in name, or in a user's file

A workload never knows how many ranks there are, which devices they have, or how they were started. No torch here.
"""

from everyrank.workload.batch import LR_RULES
from everyrank.workload.find import BUILT_IN, HIDDEN_NAME, check_place, find_workload, load, parse_settings
from everyrank.workload.workload import Source, Workload, changed

__all__ = [
    "BUILT_IN",
    "HIDDEN_NAME",
    "LR_RULES",
    "Source",
    "Workload",
    "changed",
    "check_place",
    "find_workload",
    "load",
    "parse_settings",
]
