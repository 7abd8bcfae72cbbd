"""What does a step cost beside a hand-written loop? everyrank, Accelerate, Fabric and the Trainer, in one table.

    python benchmarks/overhead.py digits text mlp one --json benchmarks/records/overhead-cpu.json

Needs `pip install -e '.[benchmarks]'`. The same DDP training runs in every arm, in the same two processes, one thread
each, on gloo, and those that say so on shm (`mlp`: 17 MB of gradients; `one`: a model of one parameter, in one
process). Where the model has batch norm, everyrank also runs with the other tools' (each rank's own), and they with
everyrank's (over ranks, the hand-written loop's code). The arms take turns: in each round each does a few updates, in
an order drawn anew; what is quoted is the median over rounds of the time divided by the hand-written loop's in the same
round, with its 95% bootstrap interval. The slower rank's time counts. Nothing is printed or logged inside. `loss` says
how far the first losses are from the hand-written loop's: who trains something else is seen.
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

# updates of a turn, and rounds: about five minutes in all on two cores
ROUNDS = {"digits": (10, 600), "text": (3, 60), "mlp": (5, 60), "one": (200, 80)}
OF_OURS = {"mlp": mlp.workload, "one": one_parameter.workload}  # the others are built in
# the noise of gloo is larger than what is looked for on digits: the two that are held against each other run oftener
HELD_AGAINST_EACH_OTHER = ("hand-written", "everyrank")
OTHERS_EVERY = {"digits": 4}
LOCAL = "everyrank, batch_norm=local, shm"  # the other tools' arithmetic


@dataclass
class Arm:
    """One way of writing the loop."""

    name: str
    updates: Iterator[Any]
    losses: list[float] = field(default_factory=list[float])
    seconds: dict[int, float] = field(default_factory=dict[int, float])  # of a step, by round
    updates_at_once: int = 1  # how many each item of `updates` stands for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="*", default=list(ROUNDS), help="default: " + ", ".join(ROUNDS))
    parser.add_argument("--arms", nargs="+", help="only these, and the hand-written one")
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
            subprocess.run([*command, __file__, name, "--json", str(out), *flags], check=True, env=environment())
            records += read_records(out)
    if args.json:
        write_records(records, args.json)


def environment() -> dict[str, str]:
    """One thread a rank, quiet libraries, the loopback interface."""
    quiet = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **quiet, "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}


def measure(args: argparse.Namespace) -> None:
    """In a rank: all arms of one workload."""
    (name,) = args.workload
    info = rank_info_from_environment(os.environ)
    with open_world(info, Launch(processes=info.size, device="cpu", backend="gloo")) as world:
        torch.set_num_threads(1)
        job = OF_OURS[name]() if name in OF_OURS else find_workload(name)
        job = dataclasses.replace(job, train_data=lambda data=job.train_data: OneByOne(data()))
        arms = make_arms(name, job, world, ROUNDS[name][0])
        if args.arms:
            arms = [arm for arm in arms if arm.name in args.arms or arm is arms[0]]
        steps, rounds = ROUNDS[name]
        rounds = args.rounds or rounds
        for arm in arms:  # warm-up: DDP rebuilds its buckets in the second update, optimizers make their state
            for _ in itertools.islice(arm.updates, -(-max(20, steps) // arm.updates_at_once)):
                pass
        order = random.Random(0)
        for done in range(rounds):
            for arm in order.sample(arms, len(arms)):
                if arm.name in HELD_AGAINST_EACH_OTHER or done % OTHERS_EVERY.get(name, 1) == 0:
                    arm.seconds[done] = turn(arm, steps, world)
            if world.rank == 0 and sys.stderr.isatty():
                print(f"\r{name}: round {done + 1} of {rounds}", end="", file=sys.stderr)
        if world.rank == 0:
            records = [record(arm, arms[0], job, world) for arm in arms]
            show(records)
            if args.json:
                write_records(records, args.json)
        sys.stdout.flush()
        dist.barrier()
        os._exit(0)  # the tools leave threads and wrappers behind that would wait for each other


class OneByOne(Dataset[Any]):
    """A dataset read sample by sample in every arm: everyrank would take the rows of a TensorDataset all at once."""

    deterministic = True

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def make_arms(name: str, job: Any, world: World, steps: int) -> list[Arm]:
    """All arms; the first is what the others are divided by."""
    has_norm = world.size > 1 and has_batch_norm(job.model())
    loops: list[tuple[str, Callable[..., Iterator[Any]]]] = []
    if name == "one":
        loops += [("hand-written", handwritten.plain)]
    else:
        shm = on_shm(world)
        loops += [("hand-written", handwritten.same_arithmetic), ("conventional", handwritten.conventional)]
        loops += [("conventional, shm", lambda job, losses: handwritten.conventional(job, losses, shm.group))]
        loops += [("everyrank, shm", lambda job, losses: tools.everyrank_loop(job, losses, shm, "ddp"))]
        if has_norm:
            loops += [(LOCAL, lambda job, losses: tools.everyrank_loop(job, losses, shm, "ddp:batch_norm=local"))]
    layout = "ddp" if world.size > 1 else "single"
    loops += [("everyrank", lambda job, losses: tools.everyrank_loop(job, losses, world, layout))]
    arms = [make_arm(arm_name, loop, job) for arm_name, loop in loops]
    jobs = {"": job}
    if has_norm:  # everyrank's arithmetic
        synchronised = dataclasses.replace(job, model=lambda: handwritten.synchronised(job.model()))
        jobs[", batch norm over ranks"] = synchronised
    for words, own in jobs.items():
        arms += [make_arm(f"accelerate{words}", tools.accelerate_loop, own)]
        arms += [make_arm(f"fabric{words}", tools.fabric_loop, own)]
        arms += [make_arm(f"trainer{words}", functools.partial(tools.trainer_loop, steps=steps), own, steps)]
    return arms


def make_arm(name: str, loop: Callable[..., Iterator[Any]], job: Any, updates_at_once: int = 1) -> Arm:
    """The loop, ready to be asked for its next updates, and the list that it writes its losses to."""
    losses: list[float] = []
    return Arm(name, loop(job, losses), losses, updates_at_once=updates_at_once)


def on_shm(world: World) -> World:
    """The same ranks, over memory that they share."""
    register_backend("shm")
    return dataclasses.replace(world, backend="shm", group=dist.new_group(backend="shm"), group_cache=GroupCache())


def turn(arm: Arm, steps: int, world: World) -> float:
    """Seconds of a step of this arm; the slower rank's."""
    gc.collect()
    gc.disable()
    if world.size > 1:
        dist.barrier()
    start = time.perf_counter()
    for _ in itertools.islice(arm.updates, steps // arm.updates_at_once):
        pass
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    gc.enable()
    if world.size > 1:
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds) / steps


def record(arm: Arm, base: Arm, job: Any, world: World) -> Record:
    """A Record; what is particular to this comparison stands under `overhead` in its provenance."""
    ratio = interval([own / base.seconds[place] for place, own in arm.seconds.items()])
    extra = interval([own - base.seconds[place] for place, own in arm.seconds.items()])
    gap = max(abs(a - b) / abs(b) for a, b in zip(arm.losses, base.losses, strict=False))
    source = provenance(job, job.train_data(), world, ["python", "benchmarks/overhead.py", job.name])
    tool, comma, words = arm.name.partition(",")
    version = importlib.metadata.version(tools.PACKAGES[tool]) if tool in tools.PACKAGES else ""
    source["overhead"] = {
        "loop": f"{tool} {version}".rstrip() + comma + words,
        "ratio_to_hand_written": plain(ratio),
        "seconds_over_hand_written": plain(extra),
        "largest_relative_loss_difference": gap,
        "losses_compared": min(len(arm.losses), len(base.losses)),
    }
    return Record(
        workload=job.name,
        layout="ddp:batch_norm=local" if arm.name == LOCAL else "ddp" if world.size > 1 else "single",
        launcher="torchrun",
        backend="shm" if arm.name.endswith("shm") else world.backend,
        device="cpu",
        world_size=world.size,
        step_seconds=interval(list(arm.seconds.values())),
        loss=arm.losses,
        provenance=source,
    )


def plain(value: Interval) -> dict[str, float]:
    return {"median": value.median, "low": value.low, "high": value.high, "rounds": value.trials}


def show(records: list[Record]) -> None:
    from rich.console import Console
    from rich.table import Table

    first = records[0]
    table = Table(title=f"{first.workload} · {first.layout} on {first.world_size}", title_justify="left")
    for name in ("loop", "step us (95%)", "x hand-written (95%)", "us over it (95%)", "loss"):
        table.add_column(name)
    for row in records:
        own = row.provenance["overhead"]
        step = row.step_seconds
        assert step is not None
        us = [f"{1e6 * value:,.0f}" for value in (step.median, step.low, step.high)]
        ratio, extra = own["ratio_to_hand_written"], own["seconds_over_hand_written"]
        over = [f"{1e6 * extra[key]:,.1f}" for key in ("median", "low", "high")]
        table.add_row(
            own["loop"],
            f"{us[0]} ({us[1]} to {us[2]})",
            f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})",
            f"{over[0]} ({over[1]} to {over[2]})",
            f"{own['largest_relative_loss_difference']:.1e}",
        )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
