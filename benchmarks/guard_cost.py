"""Measure the cost of comparing replicas every 50 updates (--guard).

    python benchmarks/guard_cost.py --json benchmarks/records/guard-cpu.json

Each round trains 50 updates and then compares the replicas. Its result is the time of the comparison divided by that of
the 50 updates, on the slowest rank. The table shows the median over rounds with its 95% bootstrap interval. The first
comparison is not counted, because it allocates what later ones reuse.
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
    """Measure all `ARMS` and return their Records on rank 0. Runs on each rank."""
    with open_world(info, launch) as world:
        torch.set_num_threads(1)
        records = [
            measure(world, name, layout, rounds if name == "digits" else max(2, rounds // 5), every, command)
            for name, layout in ARMS
        ]
    return None if world.rank else records


def measure(world: World, name: str, layout: str, rounds: int, every: int, command: list[str]) -> Record:
    """Measure one workload with one layout and return its Record."""
    job = find_workload(name)
    data = job.train_data()
    prepared = prepare(job, parse_layout(layout), world)
    per_epoch = updates_per_epoch(len(data), job.global_batch)
    updates = run_updates(prepared, data, all_updates((rounds + 1) * every, per_epoch))
    guard = Guard(prepared, "stop", every, 0)
    assert guard.compares
    update_seconds: list[float] = []
    comparison_seconds: list[float] = []
    for number in range(rounds + 1):
        update_seconds.append(time_slowest(world, lambda: list(itertools.islice(updates, every))))
        comparison_seconds.append(time_slowest(world, lambda step=(number + 1) * every: guard.check(step)))
    del update_seconds[0], comparison_seconds[0]
    ratio = interval([compare / update for compare, update in zip(comparison_seconds, update_seconds, strict=True)])
    source = provenance(job, data, world, command)
    num_parameters = sum(parameter.numel() for parameter in prepared.trainable.parameters)
    source["guard"] = {
        "every": every,
        "parameters": num_parameters,
        "share": dataclasses.asdict(ratio),
        "comparison_seconds": dataclasses.asdict(interval(comparison_seconds)),
    }
    return Record(
        workload=name,
        layout=layout,
        launcher="spawn",
        backend=world.backend,
        device=world.device.type,
        world_size=world.size,
        step_seconds=interval([seconds / every for seconds in update_seconds]),
        provenance=source,
    )


def time_slowest(world: World, function: Any) -> float:
    """Run a function on all ranks at the same time and return the seconds of the slowest rank."""
    dist.barrier()
    start = now(world.device)
    function()
    seconds = torch.tensor([now(world.device) - start], dtype=torch.float64)
    return max(float(row) for row in all_gather(seconds, world))


def print_table(records: list[Record]) -> None:
    """Print a row for each Record."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"replicas compared every {records[0].provenance['guard']['every']} updates", title_justify="left"
    )
    for name in ("workload", "layout", "parameters", "update ms", "comparison ms (95%)", "share of the updates (95%)"):
        table.add_column(name, justify="left" if name in ("workload", "layout") else "right")
    for record in records:
        guard, step = record.provenance["guard"], record.step_seconds
        assert step is not None
        comparison, ratio = Interval(**guard["comparison_seconds"]), Interval(**guard["share"])
        table.add_row(
            record.workload,
            f"{record.layout} on {record.world_size}",
            f"{guard['parameters']:,}",
            f"{step.median * 1e3:.2f}",
            f"{comparison.median * 1e3:.2f} ({comparison.low * 1e3:.2f} to {comparison.high * 1e3:.2f})",
            f"{ratio.median:.2%} ({ratio.low:.2%} to {ratio.high:.2%})",
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
    print_table(records)
    if args.json:
        write_records(records, args.json)


if __name__ == "__main__":
    main()
