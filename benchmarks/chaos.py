"""One long training into which faults are put one after the other, each at an update and a rank that a seed gives.

    python benchmarks/chaos.py --injections 200 --json benchmarks/records/chaos-long-cpu.json

The training goes on from its last checkpoint after each fault that ends it, as a person would go on; those that do not
end it strike on the way to the next one that does. At the end every loss, the metrics and all tensors of the last
checkpoint are held against the same training without any fault. With --minutes it ends earlier: then the training goes
on to its end from there, and the Record says how many faults there were.

A full disk is not among them: the whole run would have to lie on it; `everyrank chaos` has it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from everyrank import Launch, Record, parse_layout
from everyrank.chaos.campaign import compare_runs, corrupt_checkpoint, logged_updates, train_baseline
from everyrank.chaos.faults import FAULTS, why_unnoticed
from everyrank.chaos.trainer_run import run_trainer
from everyrank.options import ChaosOptions
from everyrank.record import write_records
from everyrank.runs import checkpoints_of, damage
from everyrank.runs.folder import last_good
from everyrank.workload import Source

SAVE_EVERY = 5
GAP = (SAVE_EVERY + 1, 15)  # updates between two faults: a checkpoint is saved between them
LAST = 20  # updates after the last one


def chosen(layout: str, processes: int, count: int, seed: int) -> list[tuple[str, int, int]]:
    """(fault, update, rank), in the order of updates."""
    draw = random.Random(seed)
    names = [
        name for name in FAULTS if not FAULTS[name].needs and not why_unnoticed(name, parse_layout(layout), processes)
    ]
    found: list[tuple[str, int, int]] = []
    update = 0
    for _ in range(count):
        update += draw.randint(*GAP)
        found.append((draw.choice(names), update, draw.randrange(processes)))
    return found


def run(args: argparse.Namespace, place: Path) -> Record:
    """The long training; its Record."""
    faults = chosen(args.layout, args.processes, args.injections, args.seed)
    steps = faults[-1][1] + LAST
    options = ChaosOptions(steps=steps, save_every=SAVE_EVERY, guard_every=SAVE_EVERY, seed=args.seed)
    launch = Launch(processes=args.processes, device="cpu", timeout_seconds=args.timeout)
    baseline = train_baseline(Source("digits"), parse_layout(args.layout), launch, options, place)
    call = dataclasses.replace(baseline.call, run=str(place / "run"))
    limit = 2 * args.timeout + 600.0 + steps
    told: list[dict[str, Any]] = []
    begun, waiting, resume = time.monotonic(), [], ""
    draw = random.Random(args.seed + 1)
    for number, (name, update, rank) in enumerate(faults):
        waiting.append({"fault": name, "update": update, "rank": rank, "journal": ""})
        if not FAULTS[name].ends:
            continue
        done = run_trainer(dataclasses.replace(call, injections=waiting, resume=resume), place / f"{number}", limit)
        told += [strike(one, done, is_last=one is waiting[-1]) for one in waiting]
        waiting = []
        resume = recovered(Path(call.run), name, told[-1], call, place / f"{number}-refused", draw, limit)
        shutil.rmtree(place / f"{number}")
        if number % 10 == 0 or told[-1]["wrong"]:
            print(f"{number + 1} of {len(faults)}: {told[-1]}", flush=True)
        if args.minutes and time.monotonic() > begun + 60 * args.minutes:
            break
    ended = run_trainer(dataclasses.replace(call, resume=resume), place / "end", limit)
    parity = compare_runs(baseline.run, Path(call.run), steps)
    source = dict(baseline.record.provenance)
    source["command"] = " ".join(["python", *sys.argv])
    source["long_run"] = {
        "injections": len(told),
        "by_fault": dict(collections.Counter(row["fault"] for row in told)),
        "wrong": [row for row in told if row["wrong"]],
        "left": sum(row["left"] for row in told) + ended.num_left,
        "most_updates_lost": max(row["lost"] for row in told),
        "updates_lost": sum(row["lost"] for row in told),
        "median_notice_seconds": medians(told),
        "last_attempt": ended.message or "ended well",
        "seed": args.seed,
        "steps": steps,
    }
    return dataclasses.replace(baseline.record, parity=parity, provenance=source, loss=[])


def strike(one: dict[str, Any], done: Any, is_last: bool) -> dict[str, Any]:
    """What came of one fault; of those on the way, that the training went on is all there is to see."""
    fault = FAULTS[one["fault"]]
    row = {"fault": one["fault"], "update": one["update"], "left": 0, "lost": 0, "seconds": None, "wrong": ""}
    if not is_last:
        return row
    row["left"] = done.num_left
    if done.injected_at is None:
        return row | {"wrong": f"it never struck: {done.message}"}
    if not fault.message_pattern:
        return row | {
            "seconds": done.all_ended_at - done.injected_at,
            "wrong": "processes were left" if done.num_left else "",
        }
    is_said = "ended by SIGKILL" in done.message if fault.corrupts else fault.is_reported_in(done.message, one["rank"])
    is_noticed = done.status not in (0, None) and is_said
    return row | {
        "seconds": done.ended_at - done.injected_at,
        "wrong": "" if is_noticed else f"{done.status}: {done.message}",
    }


def recovered(
    run: Path, name: str, row: dict[str, Any], call: Any, place: Path, draw: random.Random, limit: float
) -> str:
    """What to go on from: the run, or the checkpoint that is offered where its newest is spoilt."""
    resume, reached = str(run), max(row["update"], len(logged_updates(run)))
    if FAULTS[name].corrupts:
        newest = checkpoints_of(run)[-1]
        corrupt_checkpoint(newest, FAULTS[name].corrupts, draw)
        refused = run_trainer(dataclasses.replace(call, resume=resume), place, limit)
        shutil.rmtree(place)
        if not FAULTS[name].is_reported_in(refused.message, 0):
            row["wrong"] = f"a spoilt checkpoint was not refused: {refused.message}"
        good = last_good(newest.path)
        assert good is not None
        resume = str(good.path)
    whole = [one.metadata.step for one in checkpoints_of(run) if damage(one) is None]
    row["lost"] = reached - max(whole)
    if row["lost"] > SAVE_EVERY * (2 if FAULTS[name].corrupts else 1):
        row["wrong"] = row["wrong"] or f"{row['lost']} updates are lost"
    return resume


def medians(told: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds until the command had ended, by fault."""
    seconds: dict[str, list[float]] = {}
    for row in told:
        if row["seconds"] is not None:
            seconds.setdefault(row["fault"], []).append(row["seconds"])
    return {name: round(statistics.median(values), 2) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="ddp")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--injections", type=int, default=200)
    parser.add_argument("--minutes", type=float, help="no further fault after so long")
    parser.add_argument("--timeout", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="everyrank-chaos-"))
    try:
        record = run(args, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(record.parity)
    print(record.provenance["long_run"])
    if args.json:
        write_records([record], args.json)


if __name__ == "__main__":
    main()
