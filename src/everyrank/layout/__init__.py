"""Where the mathematics runs: the strategy, the degree of each mesh axis, and what is common to all layouts.

    table.py      the strategies and their options: one row each
    layout.py     Layout, and how one is written: `ddp:accumulate=4,precision=bf16`
    options.py    the options of a strategy: a dataclass for each mechanism
    contract.py   own parallel code: a person's function in a file, and what it says of itself

Imports no torch: a mistyped layout costs no seconds.
"""

from everyrank.layout.contract import OwnCode, ParallelContract, find_own_code, give_own_code
from everyrank.layout.layout import PRECISIONS, Layout, check_reference, parse_layout
from everyrank.layout.table import AXES, DATA_AXES, SAMPLE_AXES, STRATEGIES, Strategy, find_strategy

__all__ = [
    "AXES",
    "DATA_AXES",
    "PRECISIONS",
    "SAMPLE_AXES",
    "STRATEGIES",
    "Layout",
    "OwnCode",
    "ParallelContract",
    "Strategy",
    "check_reference",
    "find_own_code",
    "find_strategy",
    "give_own_code",
    "parse_layout",
]
