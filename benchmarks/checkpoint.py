"""How long a training stands still for a checkpoint: torch.save, torch.distributed.checkpoint, and in the background.

    python benchmarks/checkpoint.py --json benchmarks/records/checkpoint-cpu.json

A decoder with AdamW on two ranks, saved three ways in turns: the stall is how long the training stands still, of the
slowest rank. Then one update is done, beside the writing where that goes on in the background, and timed too; `on disk`
is when the last byte was there without it. torch.save gathers a sharded model on rank 0 first, which writes alone and
calls fsync, as DCP does. everyrank's two ways also sum every file (CRC-32), and remove the checkpoint before.

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
ARMS = ("torch.save", "DCP, synchronous", "DCP, in the background")


def workload(model: str) -> Workload:
    return Workload(
        name=f"decoder {model}",
        model=lambda: Decoder(MODELS[model]),
        train_data=lambda: Bytes(32, held_out=False),
        loss=next_token_loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
        global_batch=2,
        steps=1,
        blocks="blocks",
    )


def measure(
    info: RankInfo, launch: Launch, model: str, layout_text: str, rounds: int, folder: Path, command: list[str]
) -> list[Record] | None:
    """In a rank: all ways, and a Record of each."""
    with open_world(info, launch) as world:
        job = workload(model)
        data = job.train_data()
        times, newest = turns(world, job, data, layout_text, rounds, folder)
        records = [record(name, times, newest, job, layout_text, data, world, command) for name in ARMS]
        return records if world.rank == 0 else None


@dataclasses.dataclass
class Times:
    """Seconds, a round each."""

    stall: list[float] = dataclasses.field(default_factory=list[float])
    on_disk: list[float] = dataclasses.field(default_factory=list[float])
    next_update: list[float] = dataclasses.field(default_factory=list[float])


def turns(
    world: World, job: Workload, data: Any, layout_text: str, rounds: int, folder: Path
) -> tuple[dict[str, Times], Path | None]:
    """The ways in turns; their times, and a checkpoint to look at."""
    layout = parse_layout(layout_text)
    prepared = prepare(job, layout, world)

    def update() -> None:
        list(run_updates(prepared, data, all_updates(1, 1)))

    update()  # the optimizer has its state now
    how = (layout_text, world.size, 1, "eval_loss", {}, "")
    metadata = CheckpointMetadata(0, job.name, {}, 0, 2, None, len(data), None, *how)
    saver, behind = (
        Saver(folder / kind, prepared, world, metadata, keep=1, in_background=kind == "behind")
        for kind in ("here", "behind")
    )
    ways: dict[str, tuple[Callable[[int], object], Callable[[], None]]] = {
        ARMS[0]: (functools.partial(torch_save, prepared, world, folder), lambda: None),
        ARMS[1]: (functools.partial(saver.save, metrics={}), saver.finish),
        ARMS[2]: (functools.partial(behind.save, metrics={}), behind.finish),
    }
    times = {name: Times() for name in ways}
    for number in range(rounds + 1):
        for name, (save, finish) in ways.items():
            begun = now(world.device)
            seconds_of(world, functools.partial(save, 2 * number))
            finish()
            on_disk = slowest(now(world.device) - begun, world)
            stall = seconds_of(world, functools.partial(save, 2 * number + 1))
            updating = seconds_of(world, update)
            finish()
            if number > 0:  # the first round makes buffers
                times[name].on_disk.append(on_disk)
                times[name].stall.append(stall)
                times[name].next_update.append(updating)
    checkpoints = checkpoints_of(folder / "here")
    return times, checkpoints[-1].path if checkpoints else None


def seconds_of(world: World, function: Callable[[], object]) -> float:
    """Of the slowest rank, all of which begin together."""
    dist.barrier()
    start = now(world.device)
    function()
    return slowest(now(world.device) - start, world)


def slowest(seconds: float, world: World) -> float:
    return max(float(row) for row in all_gather(torch.tensor([seconds], dtype=torch.float64), world))


def torch_save(prepared: Prepared, world: World, folder: Path, _: int) -> None:
    """All of it on rank 0, which writes; the others wait for it, as they would at the next update."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = get_state_dict(prepared.model, prepared.trainable.optimizer, options=options)
    if world.rank == 0:
        with (folder / "partial.pt").open("wb") as file:
            torch.save({"model": model, "optimizer": optimizer}, file)
            file.flush()
            os.fsync(file.fileno())
        (folder / "partial.pt").replace(folder / "all.pt")
    dist.barrier()


def record(
    name: str,
    times: dict[str, Times],
    newest: Path | None,
    job: Workload,
    layout: str,
    data: Any,
    world: World,
    command: list[str],
) -> Record:
    source = provenance(job, data, world, command)
    beside = interval([own / first for own, first in zip(times[name].stall, times[ARMS[0]].stall, strict=True)])
    with torch.device("meta"):
        model: nn.Module = job.model()
    source["checkpoint"] = {
        "arm": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": sum(file.stat().st_size for file in newest.iterdir()) if newest is not None else None,
        "on_disk_seconds": dataclasses.asdict(interval(times[name].on_disk)),
        "stall_beside_torch_save": dataclasses.asdict(beside),
        "next_update_seconds": dataclasses.asdict(interval(times[name].next_update)),
    }
    return Record(
        workload=job.name,
        layout=layout,
        launcher="spawn",
        backend=world.backend,
        device=world.device.type,
        world_size=world.size,
        checkpoint_stall_seconds=interval(times[name].stall),
        provenance=source,
    )


def show(records: list[Record]) -> None:
    from rich.console import Console
    from rich.table import Table

    first = records[0].provenance["checkpoint"]
    size = f"{first['parameters']:,} parameters with AdamW, {first['bytes'] / 2**20:,.0f} MiB"
    title = f"{size}, {records[0].world_size} ranks"
    table = Table(title=title, title_justify="left")
    for name in ("layout", "", "stall ms (95%)", "x torch.save (95%)", "on disk after ms", "next update ms"):
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
            f"{own['next_update_seconds']['median'] * 1e3:,.0f}",
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
            results = run_ranks(launch, measure, launch, args.model, layout, args.rounds, folder, command)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        records += next(rows for rows in results.values() if rows is not None)
    show(records)
    if args.json:
        write_records(records, args.json)


if __name__ == "__main__":
    main()
