"""Compare two kernels for the chunks of ring attention: torch's CPU flash attention and plain operators.

    python benchmarks/ring_attention.py --json benchmarks/records/ring-attention-cpu.json      # three minutes

Two samples with 8 heads of 64 are attended causally, with `--length` positions over all ranks. Forward and backward are
timed separately, on the slowest rank, with the communication of keys and values. The kernels take turns, and a ratio
divides times of the same round. `difference` is the largest difference between the two kernels in the output and the
gradients, relative to the largest number of the tensor.
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
PLAIN, FLASH = "plain operators", "flash attention"
USES_FLASH = {PLAIN: False, FLASH: True}
# only for the provenance of the Records; it is not trained
JOB = Workload("ring attention", nn.Identity, list, loss=len, optimizer=len, global_batch=SAMPLES)


def run_attention(world: World, uses_flash: bool, tensors: list[Tensor]) -> tuple[list[float], list[Tensor]]:
    """Return ([seconds forward, seconds backward] on the slowest rank, [output, gradients])."""
    ring = SequenceGroup(world.rank, world.size, tuple(range(world.size)), world.group)
    q, k, v, dout = tensors
    seconds: list[float] = []

    def timed(function: Any) -> Any:
        dist.barrier()
        start = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - start)
        return result

    with mock.patch.object(chunk, "_flash_is_right", return_value=uses_flash):
        output = timed(functools.partial(ring_attention, q, k, v, True, WIDTH**-0.5, ring))
        grads = timed(functools.partial(torch.autograd.grad, output, (q, k, v), dout))
    slowest = torch.tensor(seconds)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist(), [output.detach(), *grads]


def largest_difference(tensors: list[Tensor], references: list[Tensor]) -> float:
    """Return the largest difference on all ranks, relative to the largest number of its reference tensor."""
    pairs = zip(tensors, references, strict=True)
    largest = torch.tensor(max(float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in pairs))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def measure(info: RankInfo, launch: Launch, args: argparse.Namespace, command: list[str]) -> list[Record]:
    """Measure both kernels in turns for each length and dtype, and return the Records. Runs on each rank.

    The first run of each kernel is not timed. It gives the difference.
    """
    records: list[Record] = []
    with open_world(info, launch) as world:
        for length in args.length:
            for dtype_name, dtype in DTYPES.items():
                generator = torch.Generator().manual_seed(world.rank)
                shape = (SAMPLES, HEADS, length // world.size, WIDTH)
                tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(4)]
                results = [run_attention(world, uses_flash, tensors)[1] for uses_flash in USES_FLASH.values()]
                difference = largest_difference(*results)
                seconds: dict[str, list[list[float]]] = {kernel: [] for kernel in USES_FLASH}
                for _ in range(args.rounds):
                    for kernel, uses_flash in USES_FLASH.items():
                        seconds[kernel].append(run_attention(world, uses_flash, tensors)[0])
                fields = {"length": length, "dtype": dtype_name, "difference": difference}
                records += [make_record(world, kernel, seconds, fields, command) for kernel in USES_FLASH]
    return records


def make_record(
    world: World, kernel: str, seconds: dict[str, list[list[float]]], fields: dict[str, Any], command: list[str]
) -> Record:
    """Return the Record of one kernel at one length. `step_seconds` covers forward and backward."""
    times: dict[str, Any] = {}
    for index, direction in enumerate(("forward", "backward")):
        pairs = zip(seconds[PLAIN], seconds[kernel], strict=True)
        ratios = [plain[index] / measured[index] for plain, measured in pairs]
        times[direction] = dataclasses.asdict(interval([measured[index] for measured in seconds[kernel]]))
        times[f"{direction}_times_as_fast"] = dataclasses.asdict(interval(ratios))
    return Record(
        workload=JOB.name,
        layout="context",
        launcher="spawn",
        backend=world.backend,
        device=world.device.type,
        world_size=world.size,
        step_seconds=interval([sum(measured) for measured in seconds[kernel]]),
        provenance={**provenance(JOB, [], world, command), "ring": {"arm": kernel, **fields, **times}},
    )


def print_table(records: list[Record]) -> None:
    """Print a row for each pair of Records: plain operators, then flash attention."""
    columns = ("length", "dtype", "forward ms", "backward ms", "x plain, forward (95%)", "backward (95%)", "difference")
    table = Table(*columns)

    def ratio_text(ratio: dict[str, float]) -> str:
        return f"{ratio['median']:.1f} ({ratio['low']:.1f} to {ratio['high']:.1f})"

    for plain_record, flash_record in zip(records[::2], records[1::2], strict=True):
        plain, flash = plain_record.provenance["ring"], flash_record.provenance["ring"]
        table.add_row(
            str(flash["length"]),
            flash["dtype"],
            *(
                f"{plain[direction]['median'] * 1e3:.1f} -> {flash[direction]['median'] * 1e3:.1f}"
                for direction in ("forward", "backward")
            ),
            ratio_text(flash["forward_times_as_fast"]),
            ratio_text(flash["backward_times_as_fast"]),
            f"{flash['difference']:.1e}",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--length", type=int, nargs="+", default=list(LENGTHS), help="positions over all ranks")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    launch = Launch(processes=args.processes)
    records = run_ranks(launch, measure, launch, args, ["python", *sys.argv])[0]
    print_table(records)
    if args.json is not None:
        write_records(records, args.json)


if __name__ == "__main__":
    main()
