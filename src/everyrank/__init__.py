"""everyrank: PyTorch distributed training that checks its own numbers.

    from everyrank import Layout, Launch, find_workload, run

    [record] = run(find_workload("digits"), Layout("ddp"), Launch(processes=2))

A `Workload` fixes the mathematics, a `Layout` fixes where it runs, a `Launch` how its processes start, and a `Record`
tells all of one run. Nothing here imports torch before it is needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from everyrank._version import __version__ as __version__
from everyrank.errors import EveryrankError
from everyrank.launch import Launch
from everyrank.layout import Layout, ParallelContract, parse_layout
from everyrank.options import BenchOptions, TrainOptions, VerifyOptions
from everyrank.record import Record, read_records, write_records
from everyrank.workload import Workload, find_workload

if TYPE_CHECKING:
    from everyrank.parallel.batch_gather import first_row, gather

__all__ = [
    "BenchOptions",
    "EveryrankError",
    "Launch",
    "Layout",
    "ParallelContract",
    "Record",
    "TrainOptions",
    "VerifyOptions",
    "Workload",
    "bench",
    "find_workload",
    "first_row",
    "gather",
    "parse_layout",
    "read_records",
    "run",
    "verify",
    "write_records",
]

from everyrank.api import bench, run, verify


def __getattr__(name: str) -> Any:
    """What a loss calls, and what needs torch: `gather` and `first_row`."""
    if name in ("first_row", "gather"):
        return getattr(importlib.import_module("everyrank.parallel.batch_gather"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
