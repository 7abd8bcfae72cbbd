"""Measure the step time of everyrank, Accelerate, Fabric and the Trainer, relative to a hand-written loop.

    python benchmarks/overhead.py digits text mlp one --json benchmarks/records/overhead-cpu.json

Needs `pip install -e '.[benchmarks]'`. Every arm runs the same DDP training in the same two processes with one thread
each. The backend is gloo, or shm where the name of the arm ends in shm. `mlp` has 17 MB of gradients. `one` is a model
of one parameter, trained in one process.

If the model has batch norm, each tool runs twice: with the statistics of each rank, as the other tools have it, and
with statistics over all ranks, as everyrank has it.

In each round every arm runs a few updates, in random order. The table shows the step time divided by that of the
hand-written loop in the same round: the median over rounds with its 95% bootstrap interval. The time is that of the
slower rank. Nothing is printed or logged in an arm. The column `loss` is the largest relative difference of the first
losses to those of the hand-written loop. It shows whether an arm trains something different.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import importlib.metadata
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parent))
import handwritten
import mlp
import one_parameter
import tools

from everyrank import find_workload
from everyrank.backends import register_backend
from everyrank.launch import Launch, rank_info_from_environment
from everyrank.measure.clock import interval
from everyrank.measure.provenance import provenance
from everyrank.parallel.batch_norm import has_batch_norm
from everyrank.record import Interval, Record, read_records, write_records
from everyrank.world import World, open_world
from everyrank.world.world import GroupCache

STEPS_AND_ROUNDS = {"digits": (10, 600), "text": (3, 60), "mlp": (5, 60), "one": (200, 80)}  # steps in one round
WORKLOADS = {"mlp": mlp.workload, "one": one_parameter.workload}  # the other workloads are built in
# on digits the noise of gloo is larger than the difference between these two arms, so the others skip rounds
ARMS_OF_EVERY_ROUND = ("hand-written", "everyrank")
OTHER_ARMS_EVERY = {"digits": 4}
LOCAL_NORM = "everyrank, batch_norm=local, shm"  # equivalent to the other tools


@dataclass
class Arm:
    """One training loop.

    updates            the loop, as an iterator
    losses             losses of the first updates
    seconds            seconds of a step by round
    updates_per_item   number of updates that one item of `updates` runs
    """

    name: str
    updates: Iterator[Any]
    losses: list[float] = field(default_factory=list[float])
    seconds: dict[int, float] = field(default_factory=dict[int, float])
    updates_per_item: int = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(STEPS_AND_ROUNDS)
    parser.add_argument("workload", nargs="*", default=names, help="default: " + ", ".join(names))
    parser.add_argument("--arms", nargs="+", help="run only these arms and the hand-written one")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args)
        return
    records: list[Record] = []
    flags = ["--arms", *args.arms] if args.arms else []
    flags += ["--rounds", str(args.rounds)] if args.rounds else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "records.json"
        for name in args.workload:
            count = 1 if name == "one" else 2
            command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
            subprocess.run([*command, __file__, name, "--json", str(out), *flags], check=True, env=rank_environment())
            records += read_records(out)
    if args.json:
        write_records(records, args.json)


def rank_environment() -> dict[str, str]:
    """Return environment variables for one thread per rank, quiet libraries and the loopback interface."""
    quiet = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **quiet, "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}


def measure(args: argparse.Namespace) -> None:
    """Measure all arms of one workload, print the table and write the Records. Runs on each rank."""
    (name,) = args.workload
    info = rank_info_from_environment(os.environ)
    with open_world(info, Launch(processes=info.size, device="cpu", backend="gloo")) as world:
        torch.set_num_threads(1)
        job = WORKLOADS[name]() if name in WORKLOADS else find_workload(name)
        job = dataclasses.replace(job, train_data=lambda data=job.train_data: ReadBySample(data()))
        steps, rounds = STEPS_AND_ROUNDS[name]
        rounds = args.rounds or rounds
        arms = make_arms(name, job, world, steps)
        if args.arms:
            arms = [arm for arm in arms if arm.name in args.arms or arm is arms[0]]
        for arm in arms:  # warm-up: DDP rebuilds its buckets in the second update, and optimizers create their state
            for _ in itertools.islice(arm.updates, -(-max(20, steps) // arm.updates_per_item)):
                pass
        generator = random.Random(0)
        for round_index in range(rounds):
            for arm in generator.sample(arms, len(arms)):
                if arm.name in ARMS_OF_EVERY_ROUND or round_index % OTHER_ARMS_EVERY.get(name, 1) == 0:
                    arm.seconds[round_index] = time_step(arm, steps, world)
            if world.rank == 0 and sys.stderr.isatty():
                print(f"\r{name}: round {round_index + 1} of {rounds}", end="", file=sys.stderr)
        if world.rank == 0:
            records = [make_record(arm, arms[0], job, world) for arm in arms]
            print_table(records)
            if args.json:
                write_records(records, args.json)
        sys.stdout.flush()
        dist.barrier()
        os._exit(0)  # threads and wrappers of the tools would wait for each other at a normal exit


class ReadBySample(Dataset[Any]):
    """A dataset that every arm reads sample by sample. everyrank would read a TensorDataset by batch."""

    deterministic = True

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def make_arms(name: str, job: Any, world: World, steps: int) -> list[Arm]:
    """Return all arms of a workload. The first is the hand-written loop, which the others are compared with."""
    has_norm = world.size > 1 and has_batch_norm(job.model())
    loops: list[tuple[str, Callable[..., Iterator[Any]]]] = []
    if name == "one":
        loops += [("hand-written", handwritten.plain)]
    else:
        shm = shm_world(world)
        loops += [("hand-written", handwritten.same_arithmetic), ("conventional", handwritten.conventional)]
        loops += [("conventional, shm", lambda job, losses: handwritten.conventional(job, losses, shm.group))]
        loops += [("everyrank, shm", lambda job, losses: tools.everyrank_loop(job, losses, shm, "ddp"))]
        if has_norm:
            loops += [(LOCAL_NORM, lambda job, losses: tools.everyrank_loop(job, losses, shm, "ddp:batch_norm=local"))]
    layout = "ddp" if world.size > 1 else "single"
    loops += [("everyrank", lambda job, losses: tools.everyrank_loop(job, losses, world, layout))]
    arms = [make_arm(arm_name, loop, job) for arm_name, loop in loops]
    tool_jobs = {"": job}
    if has_norm:  # the tools with the arithmetic of everyrank
        global_norm_job = dataclasses.replace(job, model=lambda: handwritten.synchronize_batch_norm(job.model()))
        tool_jobs[", batch norm over ranks"] = global_norm_job
    for suffix, tool_job in tool_jobs.items():
        arms += [make_arm(f"accelerate{suffix}", tools.accelerate_loop, tool_job)]
        arms += [make_arm(f"fabric{suffix}", tools.fabric_loop, tool_job)]
        arms += [make_arm(f"trainer{suffix}", functools.partial(tools.trainer_loop, steps=steps), tool_job, steps)]
    return arms


def make_arm(name: str, loop: Callable[..., Iterator[Any]], job: Any, updates_per_item: int = 1) -> Arm:
    """Return an arm with the started loop and the list to which it appends its losses."""
    losses: list[float] = []
    return Arm(name, loop(job, losses), losses, updates_per_item=updates_per_item)


def shm_world(world: World) -> World:
    """Return a world of the same ranks over the shm backend."""
    register_backend("shm")
    return dataclasses.replace(world, backend="shm", group=dist.new_group(backend="shm"), group_cache=GroupCache())


def time_step(arm: Arm, steps: int, world: World) -> float:
    """Run `steps` updates of this arm and return the seconds of one, on the slower rank."""
    gc.collect()
    gc.disable()
    if world.size > 1:
        dist.barrier()
    start = time.perf_counter()
    for _ in itertools.islice(arm.updates, steps // arm.updates_per_item):
        pass
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    gc.enable()
    if world.size > 1:
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds) / steps


def make_record(arm: Arm, base: Arm, job: Any, world: World) -> Record:
    """Return the Record of an arm, with the comparison to `base` under `overhead` in its provenance."""
    ratio = interval([seconds / base.seconds[index] for index, seconds in arm.seconds.items()])
    extra = interval([seconds - base.seconds[index] for index, seconds in arm.seconds.items()])
    difference = max(abs(a - b) / abs(b) for a, b in zip(arm.losses, base.losses, strict=False))
    source = provenance(job, job.train_data(), world, ["python", "benchmarks/overhead.py", job.name])
    tool, comma, variant = arm.name.partition(",")
    version = importlib.metadata.version(tools.PACKAGES[tool]) if tool in tools.PACKAGES else ""
    source["overhead"] = {
        "loop": f"{tool} {version}".rstrip() + comma + variant,
        "ratio_to_hand_written": interval_fields(ratio),
        "seconds_over_hand_written": interval_fields(extra),
        "largest_relative_loss_difference": difference,
        "losses_compared": min(len(arm.losses), len(base.losses)),
    }
    return Record(
        workload=job.name,
        layout="ddp:batch_norm=local" if arm.name == LOCAL_NORM else "ddp" if world.size > 1 else "single",
        launcher="torchrun",
        backend="shm" if arm.name.endswith("shm") else world.backend,
        device="cpu",
        world_size=world.size,
        step_seconds=interval(list(arm.seconds.values())),
        loss=arm.losses,
        provenance=source,
    )


def interval_fields(value: Interval) -> dict[str, float]:
    """Return an interval as it is written to the Record."""
    return {"median": value.median, "low": value.low, "high": value.high, "rounds": value.trials}


def print_table(records: list[Record]) -> None:
    """Print a row for each Record. The first is that of the hand-written loop."""
    from rich.console import Console
    from rich.table import Table

    first = records[0]
    table = Table(title=f"{first.workload} · {first.layout} on {first.world_size}", title_justify="left")
    for name in ("loop", "step us (95%)", "x hand-written (95%)", "us over it (95%)", "loss"):
        table.add_column(name)
    for record in records:
        overhead = record.provenance["overhead"]
        step = record.step_seconds
        assert step is not None
        step_us = [f"{1e6 * value:,.0f}" for value in (step.median, step.low, step.high)]
        ratio, extra = overhead["ratio_to_hand_written"], overhead["seconds_over_hand_written"]
        extra_us = [f"{1e6 * extra[key]:,.1f}" for key in ("median", "low", "high")]
        table.add_row(
            overhead["loop"],
            f"{step_us[0]} ({step_us[1]} to {step_us[2]})",
            f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})",
            f"{extra_us[0]} ({extra_us[1]} to {extra_us[2]})",
            f"{overhead['largest_relative_loss_difference']:.1e}",
        )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
