"""How long a training stands still for a checkpoint: torch.save, torch.distributed.checkpoint, and in the background.

    python benchmarks/checkpoint.py --json benchmarks/records/checkpoint-cpu.json

A decoder with AdamW on two ranks, saved three ways in turns, each between two barriers: the stall is the time of the
slowest rank, from one barrier to the other. `on disk` is when the last byte is there. torch.save gathers a sharded
model on rank 0 first, which writes alone and then calls fsync, as DCP does.

    --model 1b --device cuda     a billion parameters and Adam, for a GPU
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from everyrank import Launch, Record, Workload, parse_layout
from everyrank.checkpoint import Saver
from everyrank.collectives import gather
from everyrank.data import all_updates
from everyrank.launch import RankFacts, run
from everyrank.loop import run_updates
from everyrank.measure.clock import interval, now
from everyrank.measure.provenance import provenance
from everyrank.models import Decoder, DecoderShape
from everyrank.record import write_records
from everyrank.runs import About
from everyrank.strategies import Prepared, prepare
from everyrank.workloads.text import Bytes, loss
from everyrank.world import World, open_world

MODELS = {
    "small": DecoderShape(num_blocks=8, num_heads=4, width=96, hidden=256, tied=False),
    "38m": DecoderShape(num_blocks=12, num_heads=8, width=512, hidden=1376, tied=False),
    "1b": DecoderShape(num_blocks=24, num_heads=14, width=1792, hidden=4864, tied=False),
}
ARMS = ("torch.save", "DCP, synchronous", "DCP, in the background")


def workload(model: str) -> Workload:
    return Workload(
        name=f"decoder {model}",
        model=lambda: Decoder(MODELS[model]),
        train_data=lambda: Bytes(32, held_out=False),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
        global_batch=2,
        steps=1,
        blocks="blocks",
    )


def measure(
    facts: RankFacts, launch: Launch, model: str, layout_text: str, rounds: int, folder: Path, command: list[str]
) -> list[Record] | None:
    """In a rank: the arms in turns."""
    with open_world(facts, launch) as world:
        job, layout = workload(model), parse_layout(layout_text)
        prepared = prepare(job, layout, world)
        data = job.train_data()
        list(run_updates(job, data, layout, world, prepared, all_updates(1, 1)))  # the optimizer has its state now
        about = About(0, job.name, {}, 0, 2, None, len(data), None, layout_text, world.size, 1, "eval_loss", {}, "")
        savers = {
            name: Saver(folder / name.replace(" ", "-"), prepared, world, about, keep=1, in_background=is_background)
            for name, is_background in zip(ARMS[1:], (False, True), strict=True)
        }
        arms: dict[str, Callable[[int], tuple[float, float]]] = {
            ARMS[0]: functools.partial(torch_save, prepared, world, folder)
        }
        for name, saver in savers.items():
            arms[name] = functools.partial(save, saver, world)
        stalls: dict[str, list[float]] = {name: [] for name in arms}
        durable: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(rounds + 1):
            for name, arm in arms.items():
                stall, on_disk = arm(number)
                if number > 0:  # the first round makes buffers
                    stalls[name].append(stall)
                    durable[name].append(on_disk)
        num_bytes = savers[ARMS[1]].newest()
        records = [record(name, stalls, durable, num_bytes, job, layout_text, data, world, command) for name in arms]
        del prepared, savers, arms
        return records if world.rank == 0 else None


def slowest(seconds: list[float], world: World) -> list[float]:
    rows = gather(torch.tensor(seconds, dtype=torch.float64), world)
    return torch.stack(rows).max(dim=0).values.tolist()


def torch_save(prepared: Prepared, world: World, folder: Path, number: int) -> tuple[float, float]:
    path = folder / f"{number}.pt"
    dist.barrier()
    start = now(world.device)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = get_state_dict(prepared.model, prepared.optimizer, options=options)
    if world.rank == 0:
        with path.open("wb") as file:
            torch.save({"model": model, "optimizer": optimizer}, file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()
    seconds = now(world.device) - start
    if world.rank == 0:
        path.unlink()
    stall, on_disk = slowest([seconds, seconds], world)
    return stall, on_disk


def save(saver: Saver, world: World, number: int) -> tuple[float, float]:
    dist.barrier()
    start = now(world.device)
    saver.save(number, {})
    stall = now(world.device) - start
    saver.finish()
    on_disk = now(world.device) - start
    stall, on_disk = slowest([stall, on_disk], world)
    return stall, on_disk


def record(
    name: str,
    stalls: dict[str, list[float]],
    durable: dict[str, list[float]],
    newest: Path | None,
    job: Workload,
    layout: str,
    data: Any,
    world: World,
    command: list[str],
) -> Record:
    source = provenance(job, data, world, command)
    beside = interval([own / first for own, first in zip(stalls[name], stalls[ARMS[0]], strict=True)])
    with torch.device("meta"):
        model: nn.Module = job.model()
    source["checkpoint"] = {
        "arm": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": sum(file.stat().st_size for file in newest.iterdir()) if newest is not None else None,
        "on_disk_seconds": dataclasses.asdict(interval(durable[name])),
        "stall_beside_torch_save": dataclasses.asdict(beside),
    }
    return Record(
        workload=job.name,
        layout=layout,
        launcher="spawn",
        backend=world.backend,
        device=world.device.type,
        world_size=world.size,
        checkpoint_stall_seconds=interval(stalls[name]),
        provenance=source,
    )


def show(records: list[Record]) -> None:
    from rich.console import Console
    from rich.table import Table

    first = records[0].provenance["checkpoint"]
    title = f"{first['parameters']:,} parameters with AdamW, {first['bytes'] / 2**20:,.0f} MiB, two ranks"
    table = Table(title=title, title_justify="left")
    for name in ("layout", "", "stall ms (95%)", "x torch.save (95%)", "on disk after ms"):
        table.add_column(name, justify="left" if name in ("layout", "") else "right")
    for row in records:
        stall, own = row.checkpoint_stall_seconds, row.provenance["checkpoint"]
        assert stall is not None
        ratio = own["stall_beside_torch_save"]
        table.add_row(
            row.layout,
            own["arm"],
            f"{stall.median * 1e3:,.0f} ({stall.low * 1e3:,.0f} to {stall.high * 1e3:,.0f})",
            f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
            f"{own['on_disk_seconds']['median'] * 1e3:,.0f}",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="38m")
    parser.add_argument("--layout", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="on the disk that is meant; default: a temporary one")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    launch = Launch(processes=args.processes, device=args.device)
    command = ["python", *sys.argv]
    records: list[Record] = []
    for layout in args.layout:
        folder = Path(tempfile.mkdtemp(dir=args.folder))
        try:
            results = run(launch, measure, launch, args.model, layout, args.rounds, folder, command)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        records += next(rows for rows in results.values() if rows is not None)
    show(records)
    if args.json:
        write_records(records, args.json)


if __name__ == "__main__":
    main()
