"""Measure the throughput of the input pipeline in images/s, relative to JPEG decoding in one process.

    python benchmarks/input.py --json benchmarks/records/input-cpu.json

JPEG files of 500 x 375 pixels (the size of most of ImageNet) go through the training pipeline of `imagenet`: decode,
random resized crop to 224, flip, normalize, collate into batches. *decoding alone* is a plain loop that decodes the
files in one process. It is the upper limit for a pipeline with one worker. The pipeline runs with no worker and with
several, in turns with the decoding. Nothing is trained.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from everyrank import Launch, Record, find_workload
from everyrank.builtin.digits import Digits
from everyrank.data import Slice, all_updates, batches_for_updates
from everyrank.datasets.folder import read_image
from everyrank.launch import RankInfo, run_ranks
from everyrank.measure.clock import interval
from everyrank.measure.provenance import provenance
from everyrank.record import write_records
from everyrank.world import open_world

BATCH = 32
NUM_IMAGES = 256
DECODING = "decoding alone"


def write_images(folder: Path) -> None:
    """Write digits as JPEG files with the size and the noise of a photograph, about 60 kB each."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(0)
    for kind, is_validation, count in (("train", False, NUM_IMAGES), ("val", True, 8)):
        data = Digits(is_validation)
        for number in range(count):
            pixels, label = data[number]
            small = Image.fromarray((pixels[0] * 255).byte().numpy())
            large = np.asarray(small.resize((500, 375), Image.Resampling.BICUBIC), dtype=np.float32)[..., None]
            grain = noise.normal(0, 12, (375, 500, 3))
            class_folder = folder / kind / str(int(label))
            class_folder.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray((large + grain).clip(0, 255).astype(np.uint8))
            image.save(class_folder / f"{number}.jpg", quality=85)


def measure(
    info: RankInfo, launch: Launch, folder: Path, workers: list[int], rounds: int, command: list[str]
) -> list[Record]:
    """Measure all arms in turns and return the Records. Runs on the only rank."""
    with open_world(info, launch) as world:
        job = find_workload("imagenet", data=str(folder), batch=BATCH)
        data: Any = job.train_data()
        speeds: dict[str, list[float]] = {DECODING: []}  # images/s by round
        for _round in range(rounds):
            start = time.perf_counter()
            for path, _ in data.samples:
                read_image(path)
            speeds[DECODING].append(len(data) / (time.perf_counter() - start))
            for count in workers:
                worker_world = dataclasses.replace(world, loader_workers=count)
                # The first epoch is not timed, because it starts the workers. During it they may begin batches of the
                # six timed epochs, up to one less than there are workers. The error is 2% for two workers.
                updates = all_updates(7 * len(data) // BATCH, len(data) // BATCH)
                batches = batches_for_updates(job, data, updates, Slice(0, 1), 1, worker_world, torch.float32)
                for _ in range(len(data) // BATCH):
                    next(batches)
                start, num_images = time.perf_counter(), 0
                for micro_batches in batches:
                    num_images += sum(batch.size for batch in micro_batches)
                speed = num_images / (time.perf_counter() - start)
                speeds.setdefault(f"{count} workers" if count else "no worker", []).append(speed)
        records: list[Record] = []
        for arm, arm_speeds in speeds.items():
            source = provenance(job, data, world, command)
            ratios = interval([speed / decoding for speed, decoding in zip(arm_speeds, speeds[DECODING], strict=True)])
            source["input"] = {"arm": arm, "x_decoding_alone": dataclasses.asdict(ratios)}
            records.append(
                Record(
                    workload="imagenet, input alone",
                    layout="single",
                    launcher="spawn",
                    backend="none",
                    device="cpu",
                    world_size=1,
                    throughput_samples_per_second=interval(arm_speeds),
                    provenance=source,
                )
            )
        return records


def print_table(records: list[Record]) -> None:
    """Print a row for each Record."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="JPEG of 500 x 375 pixels to batches of 3 x 224 x 224", title_justify="left")
    for name in ("", "images/s (95%)", "x decoding alone (95%)"):
        table.add_column(name, justify="left" if not name else "right")
    for record in records:
        speed, ratio = record.throughput_samples_per_second, record.provenance["input"]["x_decoding_alone"]
        assert speed is not None
        table.add_row(
            record.provenance["input"]["arm"],
            f"{speed.median:,.0f} ({speed.low:,.0f} to {speed.high:,.0f})",
            f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    launch = Launch(device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        [records] = run_ranks(
            launch, measure, launch, Path(folder), args.workers, args.rounds, ["python", *sys.argv]
        ).values()
    print_table(records)
    if args.json:
        write_records(records, args.json)


if __name__ == "__main__":
    main()
