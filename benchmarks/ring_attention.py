"""Ring attention by torch's flash attention for CPUs, and by plain operators: the same ring, in turns.

    python benchmarks/ring_attention.py --json benchmarks/records/ring-attention-cpu.json      # three minutes

Two samples of 8 heads of 64, causal, `--length` positions over all ranks; forward and backward for themselves, the
seconds of the slowest rank, keys and values on their way included. The ratio is that of each round. `difference` is the
largest between the two ways, in output and gradients, relative to the largest number there.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from everyrank import Record, Workload
from everyrank.launch import Launch, RankInfo, run_ranks
from everyrank.measure.clock import interval
from everyrank.measure.provenance import provenance
from everyrank.parallel.context import chunk
from everyrank.parallel.context.attention import SequenceGroup, ring_attention
from everyrank.record import write_records
from everyrank.world import World, open_world

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16}
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
SAMPLES, HEADS, WIDTH = 2, 8, 64
ARMS = {"plain operators": False, "flash attention": True}
JOB = Workload("ring attention", nn.Identity, list, loss=len, optimizer=len, global_batch=SAMPLES)  # for provenance


def call(world: World, is_flash: bool, tensors: list[Tensor]) -> tuple[list[float], list[Tensor]]:
    """([seconds forward, seconds backward] of the slowest rank, [output, gradients])."""
    ring = SequenceGroup(world.rank, world.size, tuple(range(world.size)), world.group)
    q, k, v, dout = tensors
    seconds: list[float] = []

    def timed(function: Any) -> Any:
        dist.barrier()
        start = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - start)
        return result

    with mock.patch.object(chunk, "_flash_is_right", return_value=is_flash):
        output = timed(functools.partial(ring_attention, q, k, v, True, WIDTH**-0.5, ring))
        grads = timed(functools.partial(torch.autograd.grad, output, (q, k, v), dout))
    slowest = torch.tensor(seconds)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist(), [output.detach(), *grads]


def apart(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference, relative to the largest number of its tensor; of all ranks."""
    pairs = zip(one, other, strict=True)
    most = torch.tensor(max(float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in pairs))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def measure(info: RankInfo, launch: Launch, args: argparse.Namespace, command: list[str]) -> list[Record]:
    """In a rank: for each length and dtype both ways in turns, after a call of each that is not timed."""
    records: list[Record] = []
    with open_world(info, launch) as world:
        for length in args.length:
            for name, dtype in DTYPES.items():
                generator = torch.Generator().manual_seed(world.rank)
                shape = (SAMPLES, HEADS, length // world.size, WIDTH)
                tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(4)]
                difference = apart(*(call(world, is_flash, tensors)[1] for is_flash in ARMS.values()))
                seconds: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
                for _ in range(args.rounds):
                    for arm, is_flash in ARMS.items():
                        seconds[arm].append(call(world, is_flash, tensors)[0])
                about = {"length": length, "dtype": name, "difference": difference}
                records += [record(world, arm, seconds, about, command) for arm in ARMS]
    return records


def record(
    world: World, arm: str, seconds: dict[str, list[list[float]]], about: dict[str, Any], command: list[str]
) -> Record:
    """One way at one length: `step_seconds` is of forward and backward together."""
    base = seconds["plain operators"]
    parts: dict[str, Any] = {}
    for place, part in enumerate(("forward", "backward")):
        ratios = [before[place] / own[place] for before, own in zip(base, seconds[arm], strict=True)]
        parts[part] = dataclasses.asdict(interval([own[place] for own in seconds[arm]]))
        parts[f"{part}_times_as_fast"] = dataclasses.asdict(interval(ratios))
    return Record(
        workload=JOB.name,
        layout="context",
        launcher="spawn",
        backend=world.backend,
        device=world.device.type,
        world_size=world.size,
        step_seconds=interval([sum(own) for own in seconds[arm]]),
        provenance={**provenance(JOB, [], world, command), "ring": {"arm": arm, **about, **parts}},
    )


def show(records: list[Record]) -> None:
    columns = ("length", "dtype", "forward ms", "backward ms", "x plain, forward (95%)", "backward (95%)", "difference")
    table = Table(*columns)

    def ratio(row: dict[str, float]) -> str:
        return f"{row['median']:.1f} ({row['low']:.1f} to {row['high']:.1f})"

    for plain, flash in zip(records[::2], records[1::2], strict=True):
        before, own = plain.provenance["ring"], flash.provenance["ring"]
        table.add_row(
            str(own["length"]),
            own["dtype"],
            *(
                f"{before[part]['median'] * 1e3:.1f} -> {own[part]['median'] * 1e3:.1f}"
                for part in ("forward", "backward")
            ),
            ratio(own["forward_times_as_fast"]),
            ratio(own["backward_times_as_fast"]),
            f"{own['difference']:.1e}",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--length", type=int, nargs="+", default=list(LENGTHS), help="positions, over all ranks")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    launch = Launch(processes=args.processes)
    records = run_ranks(launch, measure, launch, args, ["python", *sys.argv])[0]
    show(records)
    if args.json is not None:
        write_records(records, args.json)


if __name__ == "__main__":
    main()
