"""The collectives that this rank has called: from torch's Flight Recorders for gloo and nccl, from `RecentCalls` for
the backends of everyrank.

A Flight Recorder records every call in C++, which takes some microseconds. There are three of them: one for gloo, one
for nccl until torch 2.14 (`nccl-legacy` in 2.15), and one for `nccl2`, which is `nccl` from torch 2.15 on. Source:
torch/csrc/distributed/c10d/FlightRecorder.hpp and `_maybe_attach_flight_recorder` in distributed_c10d.py. The functions
that dump them are private. A torch without one of them gives no calls, and the autopsy shows only stacks.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import pickle
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from everyrank.backends import RECENT_CALLS
from everyrank.errors import is_user_code

__all__ = ["KEPT_CALLS", "recorded_calls"]

_TIME = 7  # the index of the start time in a row
KEPT_CALLS = 256  # length of the Flight Recorder's ring: a dump takes 1 ms for each 100 calls
_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Byte": "uint8"}


def recorded_calls(with_locations: bool) -> dict[str, Any]:
    """Return {"groups": {name: ranks}, "calls": rows}, oldest call first. `RecentCalls.rows` describes a row.

    `with_locations` also adds the user's line to calls of gloo and nccl; the backends of everyrank always record it.
    The first `recorded_calls(True)` of a process takes seconds under gloo and nccl.
    """
    if not dist.is_initialized():
        return {}
    groups: dict[str, list[int]] = {}  # the global ranks of each group, in the order of its own ranks
    internals: Any = distributed_c10d
    for group, ranks in list(internals._world.pg_group_ranks.items()):
        with contextlib.suppress(Exception):  # another thread may be making or destroying the group
            groups[internals._world.pg_names[group]] = sorted(ranks, key=ranks.get)
    # a job with an everyrank backend still saves checkpoints over gloo
    rows = RECENT_CALLS.rows() + _flight_recorder(with_locations, groups) + _message_in_progress()
    sorted_groups = {name: sorted(ranks) for name, ranks in groups.items()}
    return {"groups": sorted_groups, "calls": sorted(rows, key=operator.itemgetter(_TIME))}


_MESSAGES = {"recv": ("src", "recv from"), "send": ("dst", "send to")}


def _message_in_progress() -> list[list[Any]]:
    """A row for the `dist.recv` or `dist.send` in which the main thread waits: gloo's recorder has no messages."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        name = frame.f_code.co_name
        if name in _MESSAGES and frame.f_code.co_filename == distributed_c10d.__file__:
            argument, text = _MESSAGES[name]
            values = frame.f_locals
            tensor, peer, group = values.get("tensor"), values.get(argument), values.get("group")
            if peer is None and (number := values.get(f"group_{argument}")) is not None:
                peer = number if group is None else dist.get_global_rank(group, number)
            if not isinstance(tensor, Tensor):
                return []
            row = [
                "",
                0,
                f"{text} {'any rank' if peer is None else int(peer)}",
                tensor.numel(),
                str(tensor.dtype).removeprefix("torch."),
            ]
            return [[*row, False, True, time.time_ns(), None]]
        frame = frame.f_back
    return []


def _flight_recorder(with_locations: bool, groups: Mapping[str, Sequence[int]]) -> list[list[Any]]:
    dumps = _dumps(sys.modules["torch._C._distributed_c10d"], with_locations)
    return [_row(entry, groups) for dump in dumps for entry in dump.get("entries", [])[-KEPT_CALLS:]]


def _load(dump: bytes, with_locations: bool) -> dict[str, Any]:
    # safe, because this process has just made the pickle
    return pickle.loads(dump) if with_locations else json.loads(dump)  # noqa: S301


def _dumps(binding: Any, with_locations: bool) -> Iterator[dict[str, Any]]:
    """Yield the dump of each Flight Recorder that this torch has."""
    ending, args = ("", (True, True, False)) if with_locations else ("_json", (True, False))
    generic = getattr(binding, f"_dump_fr_trace{ending}", None)
    if generic is not None:
        yield _load(generic(*args), with_locations)
    if generic is not None and hasattr(binding, "FlightRecorderHook"):
        try:
            hooked = generic(*args, backend="nccl2")
        except TypeError:  # this torch records nccl2 in the recorder for gloo
            hooked = None
        if hooked is not None:
            yield _load(hooked, with_locations)
    legacy_nccl = getattr(binding, f"_dump_nccl_trace{ending}", None)  # in CUDA builds
    if legacy_nccl is not None:
        yield _load(legacy_nccl(*args), with_locations)


def _row(entry: dict[str, Any], groups: Mapping[str, Sequence[int]]) -> list[Any]:
    dtype = entry["input_dtypes"][0] if entry["input_dtypes"] else ""
    is_message = bool(entry["is_p2p"])
    locations = [(frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", [])]
    group = entry["process_group"][0]
    return [
        group,
        entry["p2p_seq_id"] if is_message else entry["collective_seq_id"],
        _operation(entry["profiling_name"].rpartition(":")[2], is_message, groups.get(group, ())),
        sum(math.prod(sizes) for sizes in entry["input_sizes"]),
        _DTYPES.get(dtype, dtype.lower()),
        bool(entry["retired"]) or entry["state"] == "completed",
        is_message,
        entry["time_created_ns"],
        next((location for location in locations if is_user_code(location[0])), None),
    ]


_PEER = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)")


def _operation(name: str, is_message: bool, ranks: Sequence[int]) -> str:
    """`all_reduce`; for a message that names its peer (nccl: `recv 0<-1`) `recv from 1`.

    nccl names the peer by its rank in the group; `ranks` are the global ranks of the group.
    """
    match = _PEER.match(name) if is_message else None
    if match is None:
        return name.split(" ")[0]
    peer = int(match[2])
    return f"{_MESSAGES[match[1]][1]} {ranks[peer] if peer < len(ranks) else peer}"
