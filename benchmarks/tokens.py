"""Tokens a second of everyrank's `single` beside a hand-written loop, and the share of the device's matrix rate.

    python benchmarks/tokens.py text-124m --json benchmarks/records/tokens-h200.json     on a GPU
    python benchmarks/tokens.py text                                                    anywhere, to see that it works

Both compile the blocks, compute in bf16 under autocast, and step a fused AdamW. They take turns in one process. The
matrix rate is what this device does in a bf16 multiplication of 8192 x 8192 (1024 x 1024 on CPU), measured here before
the turns; the share counts 6 floating-point operations a parameter and token, and 12 x blocks x width x length for
attention (Chowdhery et al. 2022, appendix B).
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
    """As a person writes it who wants it fast."""
    torch.manual_seed(job.seed)
    model: nn.Module = job.model().to(device).train()
    for block in model.get_submodule(job.blocks).children():
        block.compile()
    optimizer, parameters = job.optimizer(model), list(model.parameters())
    schedule = job.schedule(optimizer)
    for epoch in itertools.count():
        order = epoch_order(len(dataset), job.seed, epoch)
        batches = [order[start : start + job.global_batch] for start in range(0, len(order), job.global_batch)]
        for value, target in DataLoader(dataset, batch_sampler=batches, pin_memory=device.type == "cuda"):
            moved = {name: tensor.to(device, non_blocking=True) for name, tensor in value.items()}
            with torch.autocast(device.type, dtype=torch.bfloat16):
                total, count = job.loss(model(**moved), target.to(device, non_blocking=True))
                loss = total / count
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, job.clip_norm)
            optimizer.step()
            schedule.step()
            yield loss.detach()


def matrix_rate(device: torch.device) -> float:
    """Floating-point operations a second of a bf16 multiplication; the best of ten."""
    size = 8192 if device.type == "cuda" else 1024
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(12):
        start = now(device)
        for _ in range(10):
            one @ other
        best = min(best, (now(device) - start) / 10)
    return 2 * size**3 / best


def operations_of_a_token(model: nn.Module, job: Any, length: int) -> float:
    """Forward and backward."""
    blocks = list(model.get_submodule(job.blocks).children())
    width = next(parameter for parameter in blocks[0].parameters() if parameter.dim() == 2).shape[1]
    return 6 * sum(p.numel() for p in model.parameters()) + 12 * len(blocks) * width * length


def measure(info: RankInfo, launch: Launch, name: str, steps: int, rounds: int, command: list[str]) -> list[Record]:
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
        rate = matrix_rate(world.device)
        operations = operations_of_a_token(prepared.model, job, length)
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        for items in arms.values():
            for _ in itertools.islice(items, 5):  # compiled in the first
                pass
        for number in range(rounds):
            for arm in sorted(arms, reverse=bool(number % 2)):
                start = now(world.device)
                for _ in itertools.islice(arms[arm], steps):
                    pass
                seconds[arm].append((now(world.device) - start) / steps)
        tokens = job.global_batch * length
        records: list[Record] = []
        for arm, own in seconds.items():
            ratio = interval([a / b for a, b in zip(own, seconds["hand-written"], strict=True)])
            source = provenance(job, dataset, world, command)
            source["tokens"] = {
                "arm": arm,
                "tokens_per_second": tokens / interval(own).median,
                "share_of_matrix_rate": tokens / interval(own).median * operations / rate,
                "matrix_rate_flops": rate,
                "ratio_to_hand_written": dataclasses.asdict(ratio),
            }
            step = interval(own)
            records.append(
                Record(
                    job.name, str(layout), "spawn", "none", world.device.type, 1, step_seconds=step, provenance=source
                )
            )
        return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="text")
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    launch = Launch(processes=1)
    command = ["python", *sys.argv]
    records: list[Record] = run_ranks(launch, measure, launch, args.workload, args.steps, args.rounds, command)[0]
    for record in records:
        own, ratio = record.provenance["tokens"], record.provenance["tokens"]["ratio_to_hand_written"]
        print(
            f"{own['arm']:13}{own['tokens_per_second']:12,.0f} tokens/s, {own['share_of_matrix_rate']:.1%} of the bf16 "
            f"matrix rate ({own['matrix_rate_flops'] / 1e12:.2f} TFLOP/s), {ratio['median']:.3f} "
            f"({ratio['low']:.3f} to {ratio['high']:.3f}) times the hand-written step"
        )
    if args.json:
        write_records(records, args.json)


if __name__ == "__main__":
    main()
