"""Which collectives this rank has called: out of torch's Flight Recorder for gloo and nccl, out of our own ring for
backends of ours.

The Flight Recorder writes down every call in C++ (some microseconds). Source:
torch/csrc/distributed/c10d/FlightRecorder.hpp. What dumps it is private: where a torch has none, calls are unknown, and
stacks alone are told.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import pickle
import sys
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from everyrank.backends import RECENT_CALLS
from everyrank.errors import is_own

__all__ = ["KEPT_CALLS", "recorded_calls"]

_TIME = 7  # in a row: when it began
KEPT_CALLS = 256  # in the Flight Recorder: its dump takes a millisecond for each hundred
_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Byte": "uint8"}


def recorded_calls(with_places: bool) -> dict[str, Any]:
    """{"groups": {name: its ranks}, "calls": rows}; a row is what `RecentCalls.rows` says.

    With places, lines of the person's code are looked up: the first time that takes seconds under gloo and nccl.
    """
    if not dist.is_initialized():
        return {}
    groups: dict[str, list[int]] = {}
    internals: Any = distributed_c10d
    for group, ranks in list(internals._world.pg_group_ranks.items()):
        with contextlib.suppress(Exception):  # one that is being made, or ended
            groups[internals._world.pg_names[group]] = sorted(ranks)
    # beside a backend of ours checkpoints go over gloo
    rows = RECENT_CALLS.rows() + _flight_recorder(with_places)
    return {"groups": groups, "calls": sorted(rows, key=operator.itemgetter(_TIME))}


def _flight_recorder(with_places: bool) -> list[list[Any]]:
    binding: Any = sys.modules["torch._C._distributed_c10d"]
    if with_places:
        dump = getattr(binding, "_dump_fr_trace", None)
        # no file's pickle: this very process has made it, just now
        found: Any = pickle.loads(dump(True, True, False)) if dump is not None else {}  # noqa: S301
    else:
        dump = getattr(binding, "_dump_fr_trace_json", None)
        found = json.loads(dump(True, False)) if dump is not None else {}
    return [_row(entry) for entry in found.get("entries", [])[-KEPT_CALLS:]]


def _row(entry: dict[str, Any]) -> list[Any]:
    dtype = entry["input_dtypes"][0] if entry["input_dtypes"] else ""
    is_message = bool(entry["is_p2p"])
    places = [(frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", [])]
    return [
        entry["process_group"][0],
        entry["p2p_seq_id"] if is_message else entry["collective_seq_id"],
        entry["profiling_name"].rpartition(":")[2].split(" ")[0],
        sum(math.prod(sizes) for sizes in entry["input_sizes"]),
        _DTYPES.get(dtype, dtype.lower()),
        bool(entry["retired"]) or entry["state"] == "completed",
        is_message,
        entry["time_created_ns"],
        next((place for place in places if is_own(place[0])), None),
    ]
