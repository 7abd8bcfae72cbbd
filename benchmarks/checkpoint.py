"""Measure how long a checkpoint stalls the training: torch.save, DCP synchronous, and DCP in the background.

    python benchmarks/checkpoint.py --json benchmarks/records/checkpoint-cpu.json
    python benchmarks/checkpoint.py --model 1b --device cuda     # a billion parameters with AdamW, for a GPU

A decoder with AdamW on two ranks is saved by the three methods in turns.

stall          time until the training can continue, on the slowest rank
next update    time of the update after it; a background checkpoint is written during this update
on disk        time until the checkpoint is complete, without an update meanwhile

For torch.save, rank 0 gathers a sharded model first, writes it and calls fsync, as DCP does. everyrank's two methods
also compute a checksum of every file (CRC-32) and remove the previous checkpoint.
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
from everyrank.builtin import Decoder, DecoderShape
from everyrank.builtin.text import Bytes, next_token_loss
from everyrank.checkpoint import Saver
from everyrank.data import all_updates
from everyrank.launch import RankInfo, run_ranks
from everyrank.loop import run_updates
from everyrank.measure.clock import interval, now
from everyrank.measure.provenance import provenance
from everyrank.record import write_records
from everyrank.runs import CheckpointMetadata, checkpoints_of
from everyrank.strategies import Prepared, prepare
from everyrank.world import World, open_world
from everyrank.world.collectives import all_gather

MODELS = {
    "small": DecoderShape(num_blocks=8, num_heads=4, width=96, hidden=256, tied=False),
    "38m": DecoderShape(num_blocks=12, num_heads=8, width=512, hidden=1376, tied=False),
    "1b": DecoderShape(num_blocks=24, num_heads=14, width=1792, hidden=4864, tied=False),
}
TORCH_SAVE, SYNCHRONOUS, BACKGROUND = METHODS = ("torch.save", "DCP, synchronous", "DCP, in the background")


def decoder_workload(model: str) -> Workload:
    """Return a workload that trains a decoder of `MODELS`."""
    return Workload(
        name=f"decoder {model}",
        model=lambda: Decoder(MODELS[model]),
        train_data=lambda: Bytes(32, is_validation=False),
        loss=next_token_loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
        global_batch=2,
        steps=1,
        blocks="blocks",
    )


def measure(
    info: RankInfo, launch: Launch, model: str, layout_text: str, rounds: int, folder: Path, command: list[str]
) -> list[Record] | None:
    """Measure all methods, and return a Record of each on rank 0. Runs on each rank."""
    with open_world(info, launch) as world:
        job = decoder_workload(model)
        data = job.train_data()
        times, newest = time_methods(world, job, data, layout_text, rounds, folder)
        records = [make_record(method, times, newest, job, layout_text, data, world, command) for method in METHODS]
        return records if world.rank == 0 else None


@dataclasses.dataclass
class Times:
    """Seconds by round of one method."""

    stall: list[float] = dataclasses.field(default_factory=list[float])
    on_disk: list[float] = dataclasses.field(default_factory=list[float])
    next_update: list[float] = dataclasses.field(default_factory=list[float])


def time_methods(
    world: World, job: Workload, data: Any, layout_text: str, rounds: int, folder: Path
) -> tuple[dict[str, Times], Path | None]:
    """Run the methods in turns. Return their times and the path of the newest synchronous checkpoint."""
    layout = parse_layout(layout_text)
    prepared = prepare(job, layout, world)

    def update() -> None:
        list(run_updates(prepared, data, all_updates(1, 1)))

    update()  # so that the optimizer has state to save
    how = (layout_text, world.size, 1, "eval_loss", {}, "")
    metadata = CheckpointMetadata(0, job.name, {}, 0, 2, None, len(data), None, *how)
    synchronous_folder = folder / "synchronous"
    synchronous = Saver(synchronous_folder, prepared, world, metadata, keep=1, in_background=False)
    background = Saver(folder / "background", prepared, world, metadata, keep=1, in_background=True)
    save_and_finish: dict[str, tuple[Callable[[int], object], Callable[[], None]]] = {
        TORCH_SAVE: (functools.partial(torch_save, prepared, world, folder), lambda: None),
        SYNCHRONOUS: (functools.partial(synchronous.save, metrics={}), synchronous.finish),
        BACKGROUND: (functools.partial(background.save, metrics={}), background.finish),
    }
    times = {method: Times() for method in METHODS}
    for number in range(rounds + 1):
        for method, (save, finish) in save_and_finish.items():
            start = now(world.device)
            time_slowest(world, functools.partial(save, 2 * number))
            finish()
            on_disk = max_over_ranks(now(world.device) - start, world)
            stall = time_slowest(world, functools.partial(save, 2 * number + 1))
            next_update = time_slowest(world, update)
            finish()
            if number > 0:  # the first round allocates buffers
                times[method].on_disk.append(on_disk)
                times[method].stall.append(stall)
                times[method].next_update.append(next_update)
    checkpoints = checkpoints_of(synchronous_folder)
    return times, checkpoints[-1].path if checkpoints else None


def time_slowest(world: World, function: Callable[[], object]) -> float:
    """Run a function on all ranks at the same time and return the seconds of the slowest rank."""
    dist.barrier()
    start = now(world.device)
    function()
    return max_over_ranks(now(world.device) - start, world)


def max_over_ranks(seconds: float, world: World) -> float:
    """Return the maximum over all ranks."""
    return max(float(row) for row in all_gather(torch.tensor([seconds], dtype=torch.float64), world))


def torch_save(prepared: Prepared, world: World, folder: Path, _: int) -> None:
    """Gather the full state on rank 0, which writes it. The other ranks wait, as they would at the next update."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = get_state_dict(prepared.model, prepared.trainable.optimizer, options=options)
    if world.rank == 0:
        with (folder / "partial.pt").open("wb") as file:
            torch.save({"model": model, "optimizer": optimizer}, file)
            file.flush()
            os.fsync(file.fileno())
        (folder / "partial.pt").replace(folder / "all.pt")
    dist.barrier()


def make_record(
    method: str,
    times: dict[str, Times],
    newest: Path | None,
    job: Workload,
    layout: str,
    data: Any,
    world: World,
    command: list[str],
) -> Record:
    """Return the Record of a method, with its times under `checkpoint` in the provenance."""
    source = provenance(job, data, world, command)
    pairs = zip(times[method].stall, times[TORCH_SAVE].stall, strict=True)
    stall_ratio = interval([stall / torch_save_stall for stall, torch_save_stall in pairs])
    with torch.device("meta"):
        model: nn.Module = job.model()
    source["checkpoint"] = {
        "arm": method,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": sum(file.stat().st_size for file in newest.iterdir()) if newest is not None else None,
        "on_disk_seconds": dataclasses.asdict(interval(times[method].on_disk)),
        "stall_beside_torch_save": dataclasses.asdict(stall_ratio),
        "next_update_seconds": dataclasses.asdict(interval(times[method].next_update)),
    }
    return Record(
        workload=job.name,
        layout=layout,
        launcher="spawn",
        backend=world.backend,
        device=world.device.type,
        world_size=world.size,
        checkpoint_stall_seconds=interval(times[method].stall),
        provenance=source,
    )


def print_table(records: list[Record]) -> None:
    """Print a row for each Record."""
    from rich.console import Console
    from rich.table import Table

    first = records[0].provenance["checkpoint"]
    size = f"{first['parameters']:,} parameters with AdamW, {first['bytes'] / 2**20:,.0f} MiB"
    title = f"{size}, {records[0].world_size} ranks"
    table = Table(title=title, title_justify="left")
    for name in ("layout", "", "stall ms (95%)", "x torch.save (95%)", "on disk after ms", "next update ms"):
        table.add_column(name, justify="left" if name in ("layout", "") else "right")
    for record in records:
        stall, checkpoint = record.checkpoint_stall_seconds, record.provenance["checkpoint"]
        assert stall is not None
        ratio = checkpoint["stall_beside_torch_save"]
        table.add_row(
            record.layout,
            checkpoint["arm"],
            f"{stall.median * 1e3:,.0f} ({stall.low * 1e3:,.0f} to {stall.high * 1e3:,.0f})",
            f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
            f"{checkpoint['on_disk_seconds']['median'] * 1e3:,.0f}",
            f"{checkpoint['next_update_seconds']['median'] * 1e3:,.0f}",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="38m")
    parser.add_argument("--layout", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="write checkpoints below this folder; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    launch = Launch(processes=args.processes, device=args.device)
    command = ["python", *sys.argv]
    records: list[Record] = []
    for layout in args.layout:
        folder = Path(tempfile.mkdtemp(dir=args.folder))
        try:
            results = run_ranks(launch, measure, launch, args.model, layout, args.rounds, folder, command)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        records += next(rows for rows in results.values() if rows is not None)
    print_table(records)
    if args.json:
        write_records(records, args.json)


if __name__ == "__main__":
    main()
