"""Repeat a published comparison of DataParallel and DistributedDataParallel, whose loader workers were unequal.

    python benchmarks/loaders.py --json benchmarks/records/loaders-cpu.json

The published scripts gave every process two loader workers. DataParallel has one process, so it had two workers in
total, while DDP had two for each device. Every DDP step also ran a barrier and three all-reduces, and read the results.
This benchmark alternates between the published settings, equal numbers of loader workers, and samples in memory with
and without the additional collectives.

Reading a sample simulates a network disk: a wait (--latency-ms), and decoding the PNG file of a digit. With
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

WARM_UP, TIMED = 10, 30  # updates; the warm-up uses up the batches that the workers prefetch before the timing starts


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run the training.

    one_process      whether one process trains, as with nn.DataParallel, not one for each rank
    workers          loader workers of each process
    base             name of the candidate that this one is compared with
    in_memory        whether the samples are read as tensors, without the simulated network disk
    published_step   whether each step has the barrier and all-reduces of the published scripts
    """

    name: str
    one_process: bool
    workers: int
    base: str
    in_memory: bool = False
    published_step: bool = False


def make_candidates(ranks: int) -> list[Candidate]:
    """Return all candidates. Those with files are compared with the first, those in memory with the fourth."""
    files_baseline, memory_baseline = "one process, 2 workers (as published)", f"{ranks} processes, samples in memory"
    return [
        Candidate(files_baseline, True, 2, files_baseline),
        Candidate(f"{ranks} processes, 2 workers each (as published)", False, 2, files_baseline),
        Candidate(f"one process, {2 * ranks} workers", True, 2 * ranks, files_baseline),
        Candidate(memory_baseline, False, 0, memory_baseline, in_memory=True),
        Candidate(
            f"{ranks} processes, samples in memory, published step",
            False,
            0,
            memory_baseline,
            in_memory=True,
            published_step=True,
        ),
    ]


class PngDigits(Dataset[tuple[Tensor, Tensor]]):
    """Digits as PNG bytes in memory. Each read waits and decodes, to simulate a network disk."""

    deterministic = True

    def __init__(self, latency_seconds: float) -> None:
        from PIL import Image

        digits = Digits(is_validation=False)
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
        train_data=lambda: PngDigits(latency_seconds),
        loss=classification_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        global_batch=64,
        epochs=10,
    )


def measure(
    info: RankInfo, launch: Launch, rounds: int, latency_seconds: float, command: list[str]
) -> list[Record] | None:
    """Measure all candidates in turns, and return their Records on rank 0. Runs on each rank."""
    with open_world(info, launch) as world:
        workload = digits_workload(latency_seconds)
        files, memory = workload.train_data(), Digits(is_validation=False)
        candidates = make_candidates(world.size)
        seconds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
        for round_index in range(rounds):
            for candidate in candidates:
                dataset = memory if candidate.in_memory else files
                if candidate.one_process:
                    key = f"loaders/{round_index}/{candidate.name}"
                    step_seconds = on_rank_0(
                        world,
                        key,
                        lambda candidate=candidate, dataset=dataset: time_step(
                            candidate, workload, dataset, single_process_world(world)
                        ),
                    )
                else:
                    dist.barrier()
                    local_seconds = torch.tensor([time_step(candidate, workload, dataset, world)], dtype=torch.float64)
                    step_seconds = max(float(row) for row in all_gather(local_seconds, world))
                if step_seconds is not None:
                    seconds[candidate.name].append(step_seconds)
        if world.rank != 0:
            return None
        return [make_record(candidate, seconds, workload, files, world, command) for candidate in candidates]


def time_step(candidate: Candidate, workload: Workload, dataset: Any, world: World) -> float:
    """Train some updates with a candidate and return the seconds of a step."""
    world = dataclasses.replace(world, loader_workers=candidate.workers)
    has_two_devices = torch.cuda.device_count() > 1
    layout = parse_layout(("dataparallel" if has_two_devices else "single") if candidate.one_process else "ddp")
    prepared = prepare(workload, layout, world)
    updates = all_updates(WARM_UP + TIMED, updates_per_epoch(len(dataset), workload.global_batch))
    losses: Iterator[Tensor] = run_updates(prepared, dataset, updates)
    if candidate.published_step:
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
    candidate: Candidate,
    seconds: dict[str, list[float]],
    workload: Workload,
    dataset: Any,
    world: World,
    command: list[str],
) -> Record:
    """Return the Record of a candidate, with its speed-up over its baseline in the provenance."""
    step_seconds = seconds[candidate.name]
    ratio = interval([base / measured for base, measured in zip(seconds[candidate.base], step_seconds, strict=True)])
    fields = provenance(workload, dataset, world, command)
    fields["loaders"] = {
        "arm": candidate.name,
        "workers_in_all": candidate.workers * (1 if candidate.one_process else world.size),
        "beside": candidate.base,
        "times_as_fast": dataclasses.asdict(ratio),
    }
    return Record(
        workload=workload.name,
        layout="single" if candidate.one_process else "ddp",
        launcher="spawn",
        backend="none" if candidate.one_process else world.backend,
        device=world.device.type,
        world_size=1 if candidate.one_process else world.size,
        step_seconds=interval(step_seconds),
        provenance=fields,
    )


def print_table(records: list[Record]) -> None:
    """Print a row for each Record."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="the same training, 64 samples a step", title_justify="left")
    for name in ("", "loader workers in total", "step ms (95%)", "speed-up over its baseline (95%)"):
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
