"""Measure exact dropout relative to torch's dropout: the operator, and an update of a decoder.

    python benchmarks/dropout_cost.py --json benchmarks/records/dropout-cpu.json      # three minutes

The operator is forward and backward of dropout 0.1 on one tensor with one thread. The `compiled` arms run the same
functions through torch.compile. The update is one of `text` with layout `single`, with dropout 0 (none), 0.1 of torch,
and 0.1 exact. All arms run in turns in one process, and a ratio divides times of the same round.
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

DROPOUT = 0.1
SHAPES = ((32, 64, 96), (8, 256, 512), (8, 1024, 768), (64, 32, 8, 8))
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
# only for the provenance of the Records; it is not trained
JOB = Workload("dropout", nn.Identity, list, loss=len, optimizer=len, global_batch=1)
Arms = dict[str, Callable[[], object]]


def operator_arms(world: World, shape: tuple[int, ...], dtype: torch.dtype) -> Arms:
    """Return functions that run forward and backward of dropout on one tensor."""
    exact = ExactDropout(0, open_mesh(parse_layout("single"), world), None, is_recomputed=False)
    exact.is_watching = True  # so that it creates keys
    exact.begin(Batch(None, None, shape[0], 0, shape[0]))
    site = DropoutSite("here", world.device)
    exact.sites.append(site)
    values, gradient = torch.randn(shape).to(dtype).requires_grad_(), torch.randn(shape).to(dtype)

    def torch_dropout(tensor: Tensor) -> Tensor:
        return F.dropout(tensor, DROPOUT)

    def exact_dropout(tensor: Tensor) -> Tensor:
        site.num_calls = 0
        return exact.drop(tensor, DROPOUT, exact.module_key(site))

    def forward_and_backward(function: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(values), values, gradient)

    functions = {"torch": torch_dropout, "exact": exact_dropout}
    compiled = {f"{name}, compiled": torch.compile(function) for name, function in functions.items()}
    return {name: forward_and_backward(function) for name, function in {**functions, **compiled}.items()}


def update_arms(world: World) -> Arms:
    """Return functions that run an update of the built-in decoder on 32 windows of 64 bytes."""
    arms: Arms = {}
    for name, changes in {
        "torch": {"dropout": "torch"},
        "exact": {},
        "none": {},
    }.items():
        workload = dataclasses.replace(text(dropout=0.0 if name == "none" else DROPOUT), **changes)
        data, _ = open_data(workload, world)
        prepared = prepare(workload, parse_layout("single"), world)
        updates = run_updates(prepared, data, [Update(step, 0, step) for step in range(100)])
        arms[name] = lambda updates=updates: next(updates)
    return arms


def time_arms(arms: Arms, rounds: int) -> dict[str, list[float]]:
    """Call the arms in turns and return the seconds by arm and round, after two rounds of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for round_index in range(rounds + 2):
        for name, function in arms.items():
            start = time.perf_counter()
            function()
            if round_index > 1:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def measure(info: RankInfo, launch: Launch, args: argparse.Namespace, command: list[str]) -> list[Record]:
    """Measure all arms of all cases and return the Records. Runs on the only rank."""
    records: list[Record] = []
    with open_world(info, launch) as world:
        torch.set_num_threads(1)
        cases = [(shape, dtype_name) for shape in SHAPES for dtype_name in DTYPES]
        for shape, dtype_name in cases:
            torch._dynamo.reset()
            seconds = time_arms(operator_arms(world, shape, DTYPES[dtype_name]), args.rounds)
            records += make_records(world, f"{' x '.join(map(str, shape))}, {dtype_name}", seconds, command)
        records += make_records(world, "update of text", time_arms(update_arms(world), args.rounds), command)
    return records


def make_records(world: World, case: str, seconds: dict[str, list[float]], command: list[str]) -> list[Record]:
    """Return a Record for each arm, with its ratio to torch's dropout."""
    records: list[Record] = []
    for arm, arm_seconds in seconds.items():
        torch_seconds = seconds["torch, compiled" if "compiled" in arm else "torch"]
        ratio = interval([a / b for a, b in zip(arm_seconds, torch_seconds, strict=True)])
        fields: dict[str, Any] = {"case": case, "arm": arm, "ratio_to_torch": dataclasses.asdict(ratio)}
        records.append(
            Record(
                workload=JOB.name,
                layout="single",
                launcher="spawn",
                backend=world.backend,
                device=world.device.type,
                world_size=world.size,
                step_seconds=interval(arm_seconds),
                provenance={**provenance(JOB, [], world, command), "dropout": fields},
            )
        )
    return records


def print_table(records: list[Record]) -> None:
    """Print a row for each Record."""
    table = Table("case", "arm", "ms", "x torch (95%)")
    for record in records:
        dropout = record.provenance["dropout"]
        ratio = dropout["ratio_to_torch"]
        assert record.step_seconds is not None
        table.add_row(
            dropout["case"],
            dropout["arm"],
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
    print_table(records)
    if args.json is not None:
        write_records(records, args.json)


if __name__ == "__main__":
    main()
