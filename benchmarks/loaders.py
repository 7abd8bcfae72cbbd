"""Repeat a published comparison of DataParallel and DistributedDataParallel, whose loader workers were unequal.

    python benchmarks/loaders.py --json benchmarks/records/loaders-cpu.json

The published scripts gave every process two loader workers. DataParallel has one process, so it had two workers in all,
while DDP had two for each device. Every DDP step also ran a barrier and three all-reduces, and read their results. This
benchmark runs the training both ways, with the published loaders and steps and with equal ones, in turns.

Reading a sample costs as much as from a network disk: a wait (--latency-ms), and decoding the PNG file of a digit. With
two CUDA devices the one process runs nn.DataParallel. Otherwise it uses one device, and the effect of the loaders is
the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import os
import sys
import time
from collections.abc import Iterator
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

WARM_UP, TIMED = 10, 30  # updates; after the warm-up no batch is left that the workers have read ahead


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to run the training.

    workers          loader workers of each process
    base             name of the arm that this one is compared with
    in_memory        whether the samples are in memory, not in files
    published_step   whether each step has the barrier and all-reduces of the published scripts
    """

    name: str
    one_process: bool
    workers: int
    base: str
    in_memory: bool = False
    published_step: bool = False


def make_arms(ranks: int) -> list[Arm]:
    """Return all arms. Those with files are compared with the first, those in memory with the fourth."""
    files, memory = "one process, 2 workers (as published)", f"{ranks} processes, samples in memory"
    return [
        Arm(files, True, 2, files),
        Arm(f"{ranks} processes, 2 workers each (as published)", False, 2, files),
        Arm(f"one process, {2 * ranks} workers", True, 2 * ranks, files),
        Arm(memory, False, 0, memory, in_memory=True),
        Arm(f"{ranks} processes, samples in memory, their step", False, 0, memory, in_memory=True, published_step=True),
    ]


class Files(Dataset[tuple[Tensor, Tensor]]):
    """Digits as PNG files, with a wait for each sample."""

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


def digits_workload(latency_seconds: float) -> Workload:
    """Return a workload that trains a small convolutional network on digits."""
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
    """Measure all arms in turns, and return their Records on rank 0. Runs on each rank."""
    with open_world(info, launch) as world:
        job = digits_workload(latency_seconds)
        files, memory = job.train_data(), Digits(held_out=False)
        arms = make_arms(world.size)
        seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
        for number in range(rounds):
            for arm in arms:
                dataset = memory if arm.in_memory else files
                if arm.one_process:
                    key = f"loaders/{number}/{arm.name}"
                    step_seconds = on_rank_0(
                        world,
                        key,
                        lambda arm=arm, dataset=dataset: time_step(arm, job, dataset, single_process_world(world)),
                    )
                else:
                    dist.barrier()
                    local_seconds = torch.tensor([time_step(arm, job, dataset, world)], dtype=torch.float64)
                    step_seconds = max(float(row) for row in all_gather(local_seconds, world))
                if step_seconds is not None:
                    seconds[arm.name].append(step_seconds)
        if world.rank != 0:
            return None
        return [make_record(arm, seconds, job, files, world, command) for arm in arms]


def time_step(arm: Arm, job: Workload, dataset: Any, world: World) -> float:
    """Train some updates with an arm and return the seconds of a step."""
    world = dataclasses.replace(world, loader_workers=arm.workers)
    has_two_devices = torch.cuda.device_count() > 1
    layout = parse_layout(("dataparallel" if has_two_devices else "single") if arm.one_process else "ddp")
    prepared = prepare(job, layout, world)
    updates = all_updates(WARM_UP + TIMED, updates_per_epoch(len(dataset), job.global_batch))
    losses: Iterator[Tensor] = run_updates(prepared, dataset, updates)
    if arm.published_step:
        losses = add_published_step(losses, world)
    for _ in itertools.islice(losses, WARM_UP):
        pass
    start = now(world.device)
    for _ in losses:
        pass
    return (now(world.device) - start) / TIMED


def add_published_step(losses: Iterator[Tensor], world: World) -> Iterator[Tensor]:
    """Yield `losses`; after each update run a barrier and three all-reduces whose results are read at once."""
    for loss in losses:
        dist.barrier()
        for _ in range(3):
            value = loss[:1].to(world.device, torch.float32)
            dist.all_reduce(value)
            (value / world.size).item()
        yield loss


def make_record(
    arm: Arm, seconds: dict[str, list[float]], job: Workload, dataset: Any, world: World, command: list[str]
) -> Record:
    """Return the Record of an arm, with its speed relative to its base arm under `loaders` in the provenance."""
    arm_seconds = seconds[arm.name]
    ratio = interval([base / measured for base, measured in zip(seconds[arm.base], arm_seconds, strict=True)])
    source = provenance(job, dataset, world, command)
    source["loaders"] = {
        "arm": arm.name,
        "workers_in_all": arm.workers * (1 if arm.one_process else world.size),
        "beside": arm.base,
        "times_as_fast": dataclasses.asdict(ratio),
    }
    return Record(
        workload=job.name,
        layout="single" if arm.one_process else "ddp",
        launcher="spawn",
        backend="none" if arm.one_process else world.backend,
        device=world.device.type,
        world_size=1 if arm.one_process else world.size,
        step_seconds=interval(arm_seconds),
        provenance=source,
    )


def print_table(records: list[Record]) -> None:
    """Print a row for each Record."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="the same training, 64 samples a step", title_justify="left")
    for name in ("", "loader workers in all", "step ms (95%)", "times as fast as the first of its kind (95%)"):
        table.add_column(name, justify="left" if not name else "right")
    for record in records:
        step, loaders = record.step_seconds, record.provenance["loaders"]
        assert step is not None
        ratio = loaders["times_as_fast"]
        table.add_row(
            loaders["arm"],
            str(loaders["workers_in_all"]),
            f"{step.median * 1e3:.1f} ({step.low * 1e3:.1f} to {step.high * 1e3:.1f})",
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
    # DataLoader warns about more workers than cores; here they mostly wait
    os.environ["PYTHONWARNINGS"] = "ignore:This DataLoader will create"
    launch = Launch(processes=args.processes)
    command = ["python", *sys.argv]
    [records] = [
        result
        for result in run_ranks(launch, measure, launch, args.rounds, args.latency_ms / 1e3, command).values()
        if result is not None
    ]
    print_table(records)
    if args.json:
        write_records(records, args.json)


if __name__ == "__main__":
    main()
