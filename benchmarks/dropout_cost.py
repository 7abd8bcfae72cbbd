"""Exact dropout beside torch's own: the operator for itself, and an update of a decoder, in turns in one process.

    python benchmarks/dropout_cost.py --json benchmarks/records/dropout-cpu.json      # three minutes

The operator is forward and backward of dropout 0.1 of one tensor, one thread. The update is one of `text` under
`single` with dropout 0 (none), 0.1 drawn by torch, and 0.1 exact. A ratio is that of a round, in which each arm has one
turn. `compiled` arms are the same functions through torch.compile.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from everyrank import Record, Workload, parse_layout
from everyrank.builtin.text import text
from everyrank.data import Batch, Update
from everyrank.launch import Launch, RankInfo, run_ranks
from everyrank.loop import open_data, run_updates
from everyrank.measure.clock import interval
from everyrank.measure.provenance import provenance
from everyrank.parallel.dropout.exact import DropoutSite, ExactDropout
from everyrank.parallel.mesh import open_mesh
from everyrank.record import write_records
from everyrank.strategies import prepare
from everyrank.world import World, open_world

P = 0.1
SHAPES = ((32, 64, 96), (8, 256, 512), (8, 1024, 768), (64, 32, 8, 8))
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
JOB = Workload("dropout", nn.Identity, list, loss=len, optimizer=len, global_batch=1)  # for provenance
Arms = dict[str, Callable[[], object]]


def operator_arms(world: World, shape: tuple[int, ...], dtype: torch.dtype) -> Arms:
    """Forward and backward of dropout of one tensor."""
    exact = ExactDropout(0, open_mesh(parse_layout("single"), world), None, is_recomputed=False)
    exact.is_watching = True  # of functions, so that keys are made
    exact.begin(Batch(None, None, shape[0], 0, shape[0]))
    site = DropoutSite("here", world.device)
    exact.sites.append(site)
    values, gradient = torch.randn(shape).to(dtype).requires_grad_(), torch.randn(shape).to(dtype)

    def of_torch(tensor: Tensor) -> Tensor:
        return F.dropout(tensor, P)

    def of_ours(tensor: Tensor) -> Tensor:
        site.num_calls = 0
        return exact.drop(tensor, P, exact.module_key(site))

    def both_ways(function: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(values), values, gradient)

    functions = {"torch": of_torch, "exact": of_ours}
    compiled = {f"{name}, compiled": torch.compile(function) for name, function in functions.items()}
    return {name: both_ways(function) for name, function in {**functions, **compiled}.items()}


def update_arms(world: World) -> Arms:
    """An update of the built-in decoder: 32 windows of 64 bytes."""
    arms: Arms = {}
    for name, changes in {
        "torch": {"dropout": "torch"},
        "exact": {},
        "none": {},
    }.items():
        workload = dataclasses.replace(text(dropout=0.0 if name == "none" else P), **changes)
        data, _ = open_data(workload, world)
        prepared = prepare(workload, parse_layout("single"), world)
        updates = run_updates(prepared, data, [Update(step, 0, step) for step in range(100)])
        arms[name] = lambda updates=updates: next(updates)
    return arms


def take_turns(arms: Arms, rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, by arm; the first two calls of each are not timed."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 2):
        for name, call in arms.items():
            start = time.perf_counter()
            call()
            if turn > 1:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def measure(info: RankInfo, launch: Launch, args: argparse.Namespace, command: list[str]) -> list[Record]:
    """In a rank: every arm of every case."""
    records: list[Record] = []
    with open_world(info, launch) as world:
        torch.set_num_threads(1)
        cases = [(shape, name) for shape in SHAPES for name in DTYPES]
        for shape, name in cases:
            torch._dynamo.reset()
            seconds = take_turns(operator_arms(world, shape, DTYPES[name]), args.rounds)
            records += in_records(world, f"{' x '.join(map(str, shape))}, {name}", seconds, command)
        records += in_records(world, "update of text", take_turns(update_arms(world), args.rounds), command)
    return records


def in_records(world: World, case: str, seconds: dict[str, list[float]], command: list[str]) -> list[Record]:
    """One for each arm, with its ratio to torch's in each round."""
    records: list[Record] = []
    for arm, own in seconds.items():
        base = seconds["torch, compiled" if "compiled" in arm else "torch"]
        ratio = interval([a / b for a, b in zip(own, base, strict=True)])
        about: dict[str, Any] = {"case": case, "arm": arm, "ratio_to_torch": dataclasses.asdict(ratio)}
        records.append(
            Record(
                workload=JOB.name,
                layout="single",
                launcher="spawn",
                backend=world.backend,
                device=world.device.type,
                world_size=world.size,
                step_seconds=interval(own),
                provenance={**provenance(JOB, [], world, command), "dropout": about},
            )
        )
    return records


def show(records: list[Record]) -> None:
    table = Table("case", "arm", "ms", "x torch (95%)")
    for record in records:
        about = record.provenance["dropout"]
        ratio = about["ratio_to_torch"]
        assert record.step_seconds is not None
        table.add_row(
            about["case"],
            about["arm"],
            f"{record.step_seconds.median * 1e3:.3f}",
            f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
        )
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    launch = Launch(processes=1)
    records = run_ranks(launch, measure, launch, args, ["python", *sys.argv])[0]
    show(records)
    if args.json is not None:
        write_records(records, args.json)


if __name__ == "__main__":
    main()
