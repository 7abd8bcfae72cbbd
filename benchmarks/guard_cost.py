"""What does it cost to compare replicas every 50 updates (--guard)?

    python benchmarks/guard_cost.py --json benchmarks/records/guard-cpu.json

Real updates on real ranks; after every 50 of them, replicas are compared. Each round gives the time of the comparison
divided by that of the 50 updates before it, of the slowest rank; what is quoted is the median over rounds with its 95%
bootstrap interval. The first comparison is left out: it makes what later ones use again.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from everyrank import Record, find_workload, parse_layout
from everyrank.data import all_updates, updates_per_epoch
from everyrank.launch import Launch, RankInfo, run_ranks
from everyrank.loop import run_updates
from everyrank.measure.clock import interval, now
from everyrank.measure.provenance import provenance
from everyrank.record import Interval, write_records
from everyrank.strategies import prepare
from everyrank.train.guard import Guard
from everyrank.world import World, open_world
from everyrank.world.collectives import all_gather

EVERY = 50
ARMS = [("digits", "ddp"), ("digits", "zero1"), ("digits", "fsdp:replicate=2,shard=1"), ("text", "ddp")]


def measure_all(info: RankInfo, launch: Launch, rounds: int, every: int, command: list[str]) -> list[Record] | None:
    """In a rank: a Record of each of `ARMS`, on rank 0."""
    with open_world(info, launch) as world:
        torch.set_num_threads(1)
        records = [
            measure(world, name, layout, rounds if name == "digits" else max(2, rounds // 5), every, command)
            for name, layout in ARMS
        ]
    return None if world.rank else records


def measure(world: World, name: str, layout: str, rounds: int, every: int, command: list[str]) -> Record:
    """The Record of one workload under one layout, on each rank."""
    job = find_workload(name)
    data = job.train_data()
    prepared = prepare(job, parse_layout(layout), world)
    per_epoch = updates_per_epoch(len(data), job.global_batch)
    updates = run_updates(prepared, data, all_updates((rounds + 1) * every, per_epoch))
    guard = Guard(prepared, "stop", every, 0)
    assert guard.compares
    updating: list[float] = []
    comparing: list[float] = []
    for number in range(rounds + 1):
        updating.append(seconds_of(world, lambda: list(itertools.islice(updates, every))))
        comparing.append(seconds_of(world, lambda done=(number + 1) * every: guard.check(done)))
    del updating[0], comparing[0]
    share = interval([own / step for own, step in zip(comparing, updating, strict=True)])
    source = provenance(job, data, world, command)
    elements = sum(parameter.numel() for parameter in prepared.trainable.parameters)
    source["guard"] = {
        "every": every,
        "parameters": elements,
        "share": dataclasses.asdict(share),
        "comparison_seconds": dataclasses.asdict(interval(comparing)),
    }
    return Record(
        workload=name,
        layout=layout,
        launcher="spawn",
        backend=world.backend,
        device=world.device.type,
        world_size=world.size,
        step_seconds=interval([seconds / every for seconds in updating]),
        provenance=source,
    )


def seconds_of(world: World, function: Any) -> float:
    """Of the slowest rank, all of which begin together."""
    dist.barrier()
    start = now(world.device)
    function()
    seconds = torch.tensor([now(world.device) - start], dtype=torch.float64)
    return max(float(row) for row in all_gather(seconds, world))


def show(records: list[Record]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"replicas compared every {records[0].provenance['guard']['every']} updates", title_justify="left"
    )
    for name in ("workload", "layout", "parameters", "update ms", "comparison ms (95%)", "share of the updates (95%)"):
        table.add_column(name, justify="left" if name in ("workload", "layout") else "right")
    for row in records:
        own, step = row.provenance["guard"], row.step_seconds
        assert step is not None
        spent, share = Interval(**own["comparison_seconds"]), Interval(**own["share"])
        table.add_row(
            row.workload,
            f"{row.layout} on {row.world_size}",
            f"{own['parameters']:,}",
            f"{step.median * 1e3:.2f}",
            f"{spent.median * 1e3:.2f} ({spent.low * 1e3:.2f} to {spent.high * 1e3:.2f})",
            f"{share.median:.2%} ({share.low:.2%} to {share.high:.2%})",
        )
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--every", type=int, default=EVERY)
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    launch = Launch(processes=args.processes, device=args.device)
    command = ["python", *sys.argv]
    [records] = filter(None, run_ranks(launch, measure_all, launch, args.rounds, args.every, command).values())
    show(records)
    if args.json:
        write_records(records, args.json)


if __name__ == "__main__":
    main()
