"""Where the mathematics runs: the strategy, the degree of each mesh axis, and what is common to all layouts.

    table.py    the strategies and their options: one row each
    layout.py   Layout, and how one is written: `ddp:accumulate=4,precision=bf16`

Imports no torch: a mistyped layout costs no seconds.
"""

from everyrank.layout.layout import PRECISIONS, Layout, parse_layout
from everyrank.layout.table import AXES, STRATEGIES, Strategy

__all__ = ["AXES", "PRECISIONS", "STRATEGIES", "Layout", "Strategy", "parse_layout"]
