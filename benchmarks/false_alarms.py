"""Verify 200 correct workloads and count the false alarms. There must be none.

    python benchmarks/false_alarms.py [--json benchmarks/records/false-alarms-cpu.json]

There are ten kinds of workload with twenty seeds each, in turn with ddp, zero1 and fsdp on two ranks. They cover the
hard cases for `verify`: batch norm, deep residual models whose rounding errors grow fast, attention whose key biases
have a gradient of zero, schedules and heads that start at 0, ties, sparse rows, tiny data, short and long runs. All run
in one process group.
"""

from __future__ import annotations

import argparse
import collections
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from everyrank import Launch, Workload, parse_layout
from everyrank.launch import run_ranks
from everyrank.loop import open_data
from everyrank.measure.provenance import provenance
from everyrank.parity import check_layout, parity_case
from everyrank.record import Record, write_records
from everyrank.world import open_world

SEEDS = 20
LAYOUTS = ("ddp", "zero1", "fsdp")


class Residual(nn.Module):
    """A residual block of two convolutions with batch norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),  # the bias has a true gradient of zero, because batch norm follows
            nn.BatchNorm2d(width),
        )

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(images + self.body(images))


class Bert(nn.Module):
    """An encoder like BERT, with positions, padding masks and a pooled head. Its key biases have a gradient of zero."""

    def __init__(self, width: int = 16, zero_head: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(40, width), nn.Embedding(12, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True, activation="gelu")
            for _ in range(2)
        )
        self.head = nn.Linear(width, 3)
        for block in self.blocks:
            nn.init.zeros_(block.self_attn.in_proj_bias)  # type: ignore[union-attr]
        if zero_head:
            nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden, src_key_padding_mask=tokens == 0)
        return self.head(hidden[:, 0])


class Recurrent(nn.Module):
    """A classifier of the last state of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.lstm, self.head = nn.Embedding(40, 8), nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(tokens))[0][:, -1])


def cross_entropy(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output, target, reduction="sum"), len(target)


def squares(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), target.numel()


def top1(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output.argmax(1) == target).sum(), len(target)


def _images(seed: int, count: int, side: int = 8) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    # only a few levels of grey, so that several pixels are the maximum
    images = torch.randint(0, 5, (count, 1, side, side), generator=generator).float() / 4
    return TensorDataset(images, torch.randint(0, 3, (count,), generator=generator))


def _sentences(seed: int, count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 40, (count, 12), generator=generator)
    lengths = torch.randint(3, 13, (count, 1), generator=generator)
    return TensorDataset(tokens * (torch.arange(12) < lengths), torch.randint(0, 3, (count,), generator=generator))


def _points(seed: int, count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randn(count, 2, generator=generator))


def _sgd(lr: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)


def _adamw(lr: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=lr)


def _from_zero(optimizer: torch.optim.Optimizer) -> Any:
    """Return a warm-up schedule whose first update has a learning rate of 0."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))


def _resnet(depth: int, width: int) -> nn.Module:
    blocks = [Residual(width) for _ in range(depth)]
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), *blocks,
        nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3),
    )  # fmt: skip


def workloads(seed: int) -> Iterator[tuple[str, Workload, int]]:
    """Yield (kind, workload, number of updates to compare) for every kind."""
    common: dict[str, Any] = {"seed": seed, "epochs": 3}
    classes: dict[str, Any] = {"loss": cross_entropy, "metrics": {"top1": top1}, **common}

    def case(kind: str, steps: int, **fields: Any) -> tuple[str, Workload, int]:
        return kind, Workload(name=f"{kind}-{seed}", **fields), steps

    yield case(
        "batch norm", 20, model=lambda: _resnet(1, 4), train_data=lambda: _images(seed, 59),
        eval_data=lambda: _images(seed + 100, 21), optimizer=_sgd(0.1), global_batch=8, **classes,
    )  # fmt: skip
    yield case(
        "deep residual, large steps", 20, model=lambda: _resnet(8, 4), train_data=lambda: _images(seed, 75),
        eval_data=lambda: _images(seed + 100, 21), optimizer=_sgd(0.5), global_batch=16, **classes,
    )  # fmt: skip
    yield case(
        "deep residual, adam", 12, model=lambda: _resnet(6, 4), train_data=lambda: _images(seed, 75),
        optimizer=_adamw(0.02), global_batch=16, **classes,
    )  # fmt: skip
    for steps in (1, 2, 20):
        yield case(
            f"bert, {steps} updates, warm-up from 0", steps, model=Bert, train_data=lambda: _sentences(seed, 37),
            eval_data=lambda: _sentences(seed + 100, 11), optimizer=_adamw(2e-3), schedule=_from_zero,
            clip_norm=1.0, global_batch=8, **classes,
        )  # fmt: skip
    yield case(
        "bert, head of zeros", 4, model=lambda: Bert(zero_head=True), train_data=lambda: _sentences(seed, 37),
        eval_data=lambda: _sentences(seed + 100, 11), optimizer=_adamw(1e-2), global_batch=8, **classes,
    )  # fmt: skip
    yield case(
        "lstm", 20, model=Recurrent, train_data=lambda: _sentences(seed, 45),
        optimizer=_adamw(1e-2), global_batch=8, **classes,
    )  # fmt: skip
    yield case(
        "tiny data", 20, model=lambda: nn.Linear(6, 2), train_data=lambda: _points(seed, 3),
        eval_data=lambda: _points(seed + 100, 2), loss=squares, optimizer=_sgd(0.05), global_batch=3, **common,
    )  # fmt: skip
    yield case(
        "long run, memorised", 120,
        model=lambda: nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)),
        train_data=lambda: _points(seed, 12), loss=squares, optimizer=_adamw(5e-3), global_batch=4,
        seed=seed, epochs=60,
    )  # fmt: skip


def verify_all(info: Any, launch: Launch, seeds: int) -> list[Record] | None:
    """Verify all workloads and return a Record of each on rank 0. Runs on each rank."""
    records: list[Record] = []
    with open_world(info, launch) as world:
        for seed in range(seeds):
            for index, (kind, workload, steps) in enumerate(workloads(seed)):
                layout = LAYOUTS[(seed + index) % len(LAYOUTS)]
                data = open_data(workload, world)
                start = time.monotonic()
                parity, _ = check_layout(
                    parity_case(workload, *data, steps), parse_layout(layout), world, f"alarm/{seed}/{index}"
                )
                if world.rank == 0:
                    print(f"{workload.name} · {layout}: {parity.status} ({time.monotonic() - start:.1f} s)", flush=True)
                    source = provenance(workload, data[0], world, ["python", "benchmarks/false_alarms.py"])
                    source = {**source, "kind": kind} if not records else {"kind": kind}  # in full only once
                    records.append(
                        Record(kind, layout, "spawn", "gloo", "cpu", world.size, parity=parity, provenance=source)
                    )
    return records or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    launch = Launch(processes=2, device="cpu", timeout_seconds=600)
    records: list[Record] = run_ranks(launch, verify_all, launch, args.seeds)[0]
    by_kind: dict[str, collections.Counter[str]] = {}
    for record in records:
        by_kind.setdefault(record.workload, collections.Counter())[record.parity.status] += 1
    for kind, counts in by_kind.items():
        print(f"{kind:40} {dict(counts)}")
    for record in records:
        if record.parity.status != "equal":
            parity = record.parity
            print(record.workload, record.layout, parity.first_divergence, parity.cause or parity.reason)
    print(f"{len(records)} verified, {sum(record.parity.status != 'equal' for record in records)} false alarms")
    if args.json is not None:
        write_records(records, args.json)


if __name__ == "__main__":
    main()
