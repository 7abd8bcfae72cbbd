"""Layouts: the strategy, the size of each mesh axis, and the options common to all layouts.

    table.py      the strategies and their options, one row each
    layout.py     Layout, and its text form: `ddp:accumulate=4,precision=bf16`
    options.py    the options of a strategy: a dataclass for each mechanism
    contract.py   custom parallelize functions and their contract

Imports no torch, so that an error in a layout is reported at once.
"""

from everyrank.layout.contract import (
    CustomParallelize,
    ParallelContract,
    find_custom_parallelize,
    register_custom_parallelize,
)
from everyrank.layout.layout import PRECISIONS, Layout, check_reference, parse_layout
from everyrank.layout.table import AXES, DATA_AXES, SAMPLE_AXES, STRATEGIES, Strategy, find_strategy

__all__ = [
    "AXES",
    "DATA_AXES",
    "PRECISIONS",
    "SAMPLE_AXES",
    "STRATEGIES",
    "CustomParallelize",
    "Layout",
    "ParallelContract",
    "Strategy",
    "check_reference",
    "find_custom_parallelize",
    "find_strategy",
    "parse_layout",
    "register_custom_parallelize",
]
