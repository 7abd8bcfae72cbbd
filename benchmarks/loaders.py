"""What a famous table measured: DataParallel against DistributedDataParallel, with unequal loader workers.

    python benchmarks/loaders.py --json benchmarks/records/loaders-cpu.json

The scripts behind it gave every process two loader workers. DataParallel is one process, so it read with two workers
what DDP read with two for each device; besides, every DDP step held a barrier, three all-reduces and three reads of
their results. This runs the same training both ways, with their loaders and steps, and with equal ones, in turns.

Reading a sample costs what it costs from a disk in the network: a wait (--latency-ms), and decoding a PNG of a real
handwritten digit. Where two CUDA devices are, the one process is nn.DataParallel; elsewhere it is one device, and the
effect of the loaders is the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from everyrank import Launch, Workload, parse_layout
from everyrank.builtin import ConvNet
from everyrank.builtin.classify import classification_loss
from everyrank.builtin.digits import Digits
from everyrank.data import all_updates, updates_per_epoch
from everyrank.launch import RankInfo, run_ranks
from everyrank.loop import run_updates
from everyrank.measure.clock import interval, now
from everyrank.measure.provenance import provenance
from everyrank.record import Record, write_records
from everyrank.strategies import prepare
from everyrank.world import World, on_rank_0, open_world, single_process_world
from everyrank.world.collectives import all_gather

WARM_UP, TIMED = 10, 30  # updates of a turn: by then what the workers read ahead is used up


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way of running it."""

    name: str
    one_process: bool
    workers: int  # of each process
    beside: str  # the arm its speed is divided by
    in_memory: bool = False
    their_step: bool = False


def arms_for(ranks: int) -> list[Arm]:
    first, third = "one process, 2 workers (as published)", f"{ranks} processes, samples in memory"
    return [
        Arm(first, True, 2, first),
        Arm(f"{ranks} processes, 2 workers each (as published)", False, 2, first),
        Arm(f"one process, {2 * ranks} workers", True, 2 * ranks, first),
        Arm(third, False, 0, third, in_memory=True),
        Arm(f"{ranks} processes, samples in memory, their step", False, 0, third, in_memory=True, their_step=True),
    ]


class Files(Dataset[tuple[Tensor, Tensor]]):
    """Digits as PNG files that take a while to come."""

    deterministic = True

    def __init__(self, latency_seconds: float) -> None:
        from PIL import Image

        digits = Digits(held_out=False)
        self.latency_seconds = latency_seconds
        self.files: list[tuple[bytes, int]] = []
        for image, digit in digits:
            file = io.BytesIO()
            pixels = (image[0] * 255).byte().numpy()
            Image.fromarray(pixels).resize((64, 64)).save(file, format="png")
            self.files.append((file.getvalue(), int(digit)))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        import numpy as np
        from PIL import Image

        content, digit = self.files[index]
        time.sleep(self.latency_seconds)
        pixels = np.array(Image.open(io.BytesIO(content)).resize((8, 8)), dtype=np.float32) / 255
        return torch.from_numpy(pixels)[None], torch.tensor(digit)


def workload(latency_seconds: float) -> Workload:
    return Workload(
        name="loaders",
        model=lambda: ConvNet(width=16, norm="group"),
        train_data=lambda: Files(latency_seconds),
        loss=classification_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        global_batch=64,
        epochs=10,
    )


def measure(
    info: RankInfo, launch: Launch, rounds: int, latency_seconds: float, command: list[str]
) -> list[Record] | None:
    """In a rank: the arms in turns."""
    with open_world(info, launch) as world:
        job = workload(latency_seconds)
        files, memory = job.train_data(), Digits(held_out=False)
        arms = arms_for(world.size)
        seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
        for number in range(rounds):
            for arm in arms:
                dataset = memory if arm.in_memory else files
                if arm.one_process:
                    key = f"loaders/{number}/{arm.name}"
                    own = on_rank_0(
                        world,
                        key,
                        lambda arm=arm, dataset=dataset: turn(arm, job, dataset, single_process_world(world)),
                    )
                else:
                    dist.barrier()
                    own = turn(arm, job, dataset, world)
                    own = max(float(row) for row in all_gather(torch.tensor([own], dtype=torch.float64), world))
                if own is not None:
                    seconds[arm.name].append(own)
        if world.rank != 0:
            return None
        return [record(arm, seconds, job, files, world, command) for arm in arms]


def turn(arm: Arm, job: Workload, dataset: Any, world: World) -> float:
    """Seconds of a step."""
    world = dataclasses.replace(world, loader_workers=arm.workers)
    has_two = torch.cuda.device_count() > 1
    layout = parse_layout(("dataparallel" if has_two else "single") if arm.one_process else "ddp")
    prepared = prepare(job, layout, world)
    updates = all_updates(WARM_UP + TIMED, updates_per_epoch(len(dataset), job.global_batch))
    shares: Iterator[Tensor] = run_updates(prepared, dataset, updates)
    if arm.their_step:
        shares = their_steps(shares, world)
    for _ in itertools.islice(shares, WARM_UP):
        pass
    start = now(world.device)
    for _ in shares:
        pass
    return (now(world.device) - start) / TIMED


def their_steps(shares: Iterator[Tensor], world: World) -> Iterator[Tensor]:
    """After each step a barrier, and three averages over all ranks that are read at once."""
    for share in shares:
        dist.barrier()
        for _ in range(3):
            value = share[:1].to(world.device, torch.float32)
            dist.all_reduce(value)
            (value / world.size).item()
        yield share


def record(
    arm: Arm, seconds: dict[str, list[float]], job: Workload, dataset: Any, world: World, command: list[str]
) -> Record:
    own = seconds[arm.name]
    ratio = interval([other / one for other, one in zip(seconds[arm.beside], own, strict=True)])
    source = provenance(job, dataset, world, command)
    source["loaders"] = {
        "arm": arm.name,
        "workers_in_all": arm.workers * (1 if arm.one_process else world.size),
        "beside": arm.beside,
        "times_as_fast": dataclasses.asdict(ratio),
    }
    return Record(
        workload=job.name,
        layout="single" if arm.one_process else "ddp",
        launcher="spawn",
        backend="none" if arm.one_process else world.backend,
        device=world.device.type,
        world_size=1 if arm.one_process else world.size,
        step_seconds=interval(own),
        provenance=source,
    )


def show(records: list[Record]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="the same training, 64 samples a step", title_justify="left")
    for name in ("", "loader workers in all", "step ms (95%)", "times as fast as the first of its kind (95%)"):
        table.add_column(name, justify="left" if not name else "right")
    for row in records:
        step, own = row.step_seconds, row.provenance["loaders"]
        assert step is not None
        text: Callable[[float], str] = lambda value: f"{value * 1e3:.1f}"  # noqa: E731
        ratio = own["times_as_fast"]
        table.add_row(
            own["arm"],
            str(own["workers_in_all"]),
            f"{text(step.median)} ({text(step.low)} to {text(step.high)})",
            f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--latency-ms", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    # more workers than cores is the point: they wait more than they compute
    os.environ["PYTHONWARNINGS"] = "ignore:This DataLoader will create"
    launch = Launch(processes=args.processes)
    command = ["python", *sys.argv]
    [records] = [
        result
        for result in run_ranks(launch, measure, launch, args.rounds, args.latency_ms / 1e3, command).values()
        if result is not None
    ]
    show(records)
    if args.json:
        write_records(records, args.json)


if __name__ == "__main__":
    main()
