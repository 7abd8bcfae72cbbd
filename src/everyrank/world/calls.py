"""Which collectives this rank has called: out of torch's Flight Recorders for gloo and nccl, out of our own ring for
backends of ours.

A Flight Recorder writes down every call in C++ (some microseconds). There are three of them: one for gloo, one for nccl
until torch 2.14 (`nccl-legacy` in 2.15), and one for `nccl2`, which `nccl` is from torch 2.15 on. Source:
torch/csrc/distributed/c10d/FlightRecorder.hpp and `_maybe_attach_flight_recorder` in distributed_c10d.py. The functions
that dump them are private: where a torch lacks one, its calls are unknown, and the autopsy has only stacks.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import pickle
import sys
from collections.abc import Iterator
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
    dumps = _dumps(sys.modules["torch._C._distributed_c10d"], with_places)
    return [_row(entry) for dump in dumps for entry in dump.get("entries", [])[-KEPT_CALLS:]]


def _load(dump: bytes, with_places: bool) -> dict[str, Any]:
    # no file's pickle: this very process has made it, just now
    return pickle.loads(dump) if with_places else json.loads(dump)  # noqa: S301


def _dumps(binding: Any, with_places: bool) -> Iterator[dict[str, Any]]:
    """What each Flight Recorder of this torch has: an empty one has no entries."""
    ending, args = ("", (True, True, False)) if with_places else ("_json", (True, False))
    generic = getattr(binding, f"_dump_fr_trace{ending}", None)
    if generic is not None:
        yield _load(generic(*args), with_places)
    if generic is not None and hasattr(binding, "FlightRecorderHook"):
        try:
            hooked = generic(*args, backend="nccl2")
        except TypeError:  # a torch whose hooks record into the one for gloo
            hooked = None
        if hooked is not None:
            yield _load(hooked, with_places)
    legacy_nccl = getattr(binding, f"_dump_nccl_trace{ending}", None)  # in CUDA builds
    if legacy_nccl is not None:
        yield _load(legacy_nccl(*args), with_places)


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
