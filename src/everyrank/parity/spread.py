"""Runs of `single` that do not need each other, shared out among the ranks; what they left, on rank 0.

Those of a layout that stands in for `single` take all ranks, one run after the other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from everyrank.layout import Layout
from everyrank.parity.case import ParityCase, Segments
from everyrank.parity.trace import Trace, trace
from everyrank.world import World, on_each_rank, single_process_world

__all__ = ["run_on_all_ranks"]


def run_on_all_ranks(
    case: ParityCase, jobs: Sequence[tuple[Layout, Segments, dict[str, Any]]], world: World, key: str
) -> list[Trace]:
    """The runs, each done by one rank on its own device; all of them on rank 0, [] elsewhere."""
    if any(single.axis is not None for single, _, _ in jobs):
        runs = [trace(case, single, world, segments, **options) for single, segments, options in jobs]
        return runs if world.rank == 0 else []
    here = replace(single_process_world(world), threads=world.threads, loader_workers=world.loader_workers)
    holders = _shared_out(jobs, world.size, world.device.type == "cuda" and world.backend == "gloo")

    def work() -> dict[int, Trace]:
        mine = [index for index, rank in enumerate(holders) if rank == world.rank]
        return {index: trace(case, jobs[index][0], here, jobs[index][1], **jobs[index][2]) for index in mine}

    own = on_each_rank(world, f"{key}/work", work)
    found: list[Trace] = []
    for index, holder in enumerate(holders):
        if world.rank == 0:
            found.append(own[index] if holder == 0 else _received(world, holder, f"{key}/{index}"))
        elif world.rank == holder:
            _send(own.pop(index), world, f"{key}/{index}")
    return found


def _shared_out(jobs: Sequence[tuple[Layout, Segments, dict[str, Any]]], size: int, is_shared: bool) -> list[int]:
    """The rank of each run: always the one that has least to do so far; float64 takes about twice as long."""
    # ranks that share a card share its memory, which one run at a time may fill
    load = [0] * (1 if is_shared else size)
    holders: list[int] = []
    for single, segments, _ in jobs:
        holders.append(min(range(len(load)), key=load.__getitem__))
        load[holders[-1]] += sum(map(len, segments)) * (2 if single.precision == "float64" else 1)
    return holders


def _send(run: Trace, world: World, key: str) -> None:
    numbers = {"losses": run.losses, "counts": run.counts, "evaluation": run.evaluation, "moved": run.moved}
    groups = [*run.finals, run.gradients]
    shapes = [[(name, str(t.dtype)[6:], list(t.shape)) for name, t in group.items()] for group in groups]
    world.store.set(f"sent/{key}", json.dumps({"numbers": numbers, "shapes": shapes}))
    for group in groups:
        for tensor in group.values():
            if tensor.numel():
                dist.send(tensor.contiguous().reshape(-1).view(torch.uint8), dst=0, group=world.group)


def _received(world: World, holder: int, key: str) -> Trace:
    sent: Any = world.store.get(f"sent/{key}")
    head = json.loads(sent.decode())
    groups: list[dict[str, Tensor]] = []
    for shapes in head["shapes"]:
        groups.append({name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in shapes})
        for tensor in groups[-1].values():
            if tensor.numel():
                dist.recv(tensor.reshape(-1).view(torch.uint8), src=holder, group=world.group)
    numbers = head["numbers"]
    evaluation = {name: (total, count) for name, (total, count) in numbers["evaluation"].items()}
    return Trace(
        numbers["losses"],
        numbers["counts"],
        evaluation,
        groups[:-1],
        True,
        moved=numbers["moved"],
        gradients=groups[-1],
    )
