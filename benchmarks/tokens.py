"""Measure tokens per second of `single` relative to a hand-written loop, and as a fraction of the matmul rate.

    python benchmarks/tokens.py text-124m --json benchmarks/records/tokens-h200.json     on a GPU
    python benchmarks/tokens.py text                                                    a quick check on any machine

Both loops compile the blocks, use bf16 autocast and a fused AdamW. They take turns in one process.

The matmul rate of the device is measured first, with bf16 matrices of 8192 x 8192 (1024 x 1024 on CPU). Per token the
fraction counts 6 floating-point operations for each parameter, and 12 x blocks x width x length for attention
(Chowdhery et al. 2022, appendix B).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from everyrank import Launch, find_workload, parse_layout
from everyrank.data import all_updates, updates_per_epoch
from everyrank.data.order import epoch_order
from everyrank.launch import RankInfo, run_ranks
from everyrank.loop import run_updates
from everyrank.measure.clock import interval, now
from everyrank.measure.provenance import provenance
from everyrank.record import Record, write_records
from everyrank.strategies import prepare
from everyrank.workload import load
from everyrank.world import open_world


def hand_written(job: Any, dataset: Any, device: torch.device) -> Iterator[Tensor]:
    """Train with a loop that a user would write for speed, and yield the loss of each update."""
    torch.manual_seed(job.seed)
    model: nn.Module = job.model().to(device).train()
    for block in model.get_submodule(job.blocks).children():
        block.compile()
    optimizer, parameters = job.optimizer(model), list(model.parameters())
    schedule = job.schedule(optimizer)
    for epoch in itertools.count():
        order = epoch_order(len(dataset), job.seed, epoch)
        batches = [order[start : start + job.global_batch] for start in range(0, len(order), job.global_batch)]
        for inputs, target in DataLoader(dataset, batch_sampler=batches, pin_memory=device.type == "cuda"):
            device_inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
            with torch.autocast(device.type, dtype=torch.bfloat16):
                total, count = job.loss(model(**device_inputs), target.to(device, non_blocking=True))
                loss = total / count
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, job.clip_norm)
            optimizer.step()
            schedule.step()
            yield loss.detach()


def measure_matmul_rate(device: torch.device) -> float:
    """Return the floating-point operations per second of a bf16 matrix multiplication; the best of 12 trials."""
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    best_seconds = float("inf")
    for _ in range(12):
        start = now(device)
        for _ in range(10):
            left @ right
        best_seconds = min(best_seconds, (now(device) - start) / 10)
    return 2 * size**3 / best_seconds


def operations_per_token(model: nn.Module, job: Any, length: int) -> float:
    """Return the floating-point operations of forward and backward for one token."""
    blocks = list(model.get_submodule(job.blocks).children())
    width = next(parameter for parameter in blocks[0].parameters() if parameter.dim() == 2).shape[1]
    return 6 * sum(p.numel() for p in model.parameters()) + 12 * len(blocks) * width * length


def measure(info: RankInfo, launch: Launch, name: str, steps: int, rounds: int, command: list[str]) -> list[Record]:
    """Time both loops in turns, and return a Record for each, with its rates under `tokens` in the provenance."""
    with open_world(info, launch) as world:
        job = load(find_workload(name))
        dataset: Any = job.train_data()
        length = len(dataset[0][1])
        layout = parse_layout("single:precision=bf16,compile")
        prepared = prepare(job, layout, world)
        updates = all_updates(10**5, updates_per_epoch(len(dataset), job.global_batch))
        arms: dict[str, Iterator[Any]] = {
            "hand-written": hand_written(job, dataset, world.device),
            "everyrank": run_updates(prepared, dataset, updates),
        }
        matmul_rate = measure_matmul_rate(world.device)
        operations = operations_per_token(prepared.model, job, length)
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        for losses in arms.values():
            for _ in itertools.islice(losses, 5):  # warm-up: the first update compiles
                pass
        for number in range(rounds):
            for arm in sorted(arms, reverse=bool(number % 2)):
                start = now(world.device)
                for _ in itertools.islice(arms[arm], steps):
                    pass
                seconds[arm].append((now(world.device) - start) / steps)
        tokens = job.global_batch * length
        records: list[Record] = []
        for arm, arm_seconds in seconds.items():
            pairs = zip(arm_seconds, seconds["hand-written"], strict=True)
            ratio = interval([measured / base for measured, base in pairs])
            step = interval(arm_seconds)
            source = provenance(job, dataset, world, command)
            source["tokens"] = {
                "arm": arm,
                "tokens_per_second": tokens / step.median,
                "share_of_matrix_rate": tokens / step.median * operations / matmul_rate,
                "matrix_rate_flops": matmul_rate,
                "ratio_to_hand_written": dataclasses.asdict(ratio),
            }
            records.append(
                Record(
                    job.name, str(layout), "spawn", "none", world.device.type, 1, step_seconds=step, provenance=source
                )
            )
        return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="text")
    parser.add_argument("--steps", type=int, default=10, help="updates of a turn")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    launch = Launch(processes=1)
    command = ["python", *sys.argv]
    records: list[Record] = run_ranks(launch, measure, launch, args.workload, args.steps, args.rounds, command)[0]
    for record in records:
        tokens = record.provenance["tokens"]
        ratio = tokens["ratio_to_hand_written"]
        print(
            f"{tokens['arm']:13}{tokens['tokens_per_second']:12,.0f} tokens/s, "
            f"{tokens['share_of_matrix_rate']:.1%} of the bf16 matmul rate "
            f"({tokens['matrix_rate_flops'] / 1e12:.2f} TFLOP/s), step time {ratio['median']:.3f} "
            f"({ratio['low']:.3f} to {ratio['high']:.3f}) times that of the hand-written loop"
        )
    if args.json:
        write_records(records, args.json)


if __name__ == "__main__":
    main()
