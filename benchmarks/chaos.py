"""Inject many faults into one long training, each at a random update and rank given by a seed.

    python benchmarks/chaos.py --injections 200 --json benchmarks/records/chaos-long-cpu.json

After each fault that ends the training, the training is resumed from its last checkpoint, as a user would do. A fault
that does not end the training is injected in the same run as the next fault. At the end the losses, the metrics and all
tensors of the last checkpoint are compared with the same training without faults.

With --minutes no fault is injected after this time, and the training runs to its end. The Record has the number of
injected faults. Faults that need a separate disk or two hosts are left out; `everyrank chaos` injects them.
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
from everyrank.chaos.trainer_run import TrainCall, TrainerRun, run_trainer
from everyrank.options import ChaosOptions
from everyrank.record import write_records
from everyrank.runs import checkpoints_of, damage
from everyrank.runs.folder import last_good
from everyrank.workload import Source

SAVE_EVERY = 5
UPDATES_BETWEEN_FAULTS = (SAVE_EVERY + 1, 15)  # more than SAVE_EVERY, so that a checkpoint is saved between two faults
UPDATES_AFTER_LAST_FAULT = 20


def draw_faults(layout: str, processes: int, count: int, seed: int) -> list[tuple[str, int, int]]:
    """Return `count` random tuples (fault, update, rank), sorted by update."""
    generator = random.Random(seed)
    names = [
        name for name in FAULTS if not FAULTS[name].needs and not why_unnoticed(name, parse_layout(layout), processes)
    ]
    faults: list[tuple[str, int, int]] = []
    update = 0
    for _ in range(count):
        update += generator.randint(*UPDATES_BETWEEN_FAULTS)
        faults.append((generator.choice(names), update, generator.randrange(processes)))
    return faults


def run_long_training(args: argparse.Namespace, folder: Path) -> Record:
    """Train with all faults in `folder` and return the Record, with the outcome under `long_run` in its provenance."""
    faults = draw_faults(args.layout, args.processes, args.injections, args.seed)
    steps = faults[-1][1] + UPDATES_AFTER_LAST_FAULT
    options = ChaosOptions(steps=steps, save_every=SAVE_EVERY, guard_every=SAVE_EVERY, seed=args.seed)
    launch = Launch(processes=args.processes, device="cpu", timeout_seconds=args.timeout)
    baseline = train_baseline(Source("digits"), parse_layout(args.layout), launch, options, folder)
    call = dataclasses.replace(baseline.call, run=str(folder / "run"))
    limit_seconds = 2 * args.timeout + 600.0 + steps
    outcomes: list[dict[str, Any]] = []
    pending: list[dict[str, Any]] = []  # the injections of the next run
    start, resume = time.monotonic(), ""
    generator = random.Random(args.seed + 1)
    for index, (name, update, rank) in enumerate(faults):
        pending.append({"fault": name, "update": update, "rank": rank, "journal": ""})
        if not FAULTS[name].ends:
            continue
        call_with_faults = dataclasses.replace(call, injections=pending, resume=resume)
        trainer_run = run_trainer(call_with_faults, folder / f"{index}", limit_seconds)
        outcomes += [check_fault(injection, trainer_run, injection is pending[-1]) for injection in pending]
        pending = []
        refused_folder = folder / f"{index}-refused"
        resume = choose_resume(Path(call.run), name, outcomes[-1], call, refused_folder, generator, limit_seconds)
        shutil.rmtree(folder / f"{index}")
        if index % 10 == 0 or outcomes[-1]["wrong"]:
            print(f"{index + 1} of {len(faults)}: {outcomes[-1]}", flush=True)
        if args.minutes and time.monotonic() > start + 60 * args.minutes:
            break
    # the last faults of the list may be pending: they do not end the training
    last_call = dataclasses.replace(call, injections=pending, resume=resume)
    last_run = run_trainer(last_call, folder / "end", limit_seconds)
    outcomes += [check_fault(injection, last_run, ends_run=False) for injection in pending]
    parity = compare_runs(baseline.run, Path(call.run), steps)
    provenance = dict(baseline.record.provenance)
    provenance["command"] = " ".join(["python", *sys.argv])
    provenance["long_run"] = {
        "injections": len(outcomes),
        "by_fault": dict(collections.Counter(outcome["fault"] for outcome in outcomes)),
        "wrong": [outcome for outcome in outcomes if outcome["wrong"]],
        "left": sum(outcome["left"] for outcome in outcomes) + last_run.num_left,
        "most_updates_lost": max((outcome["lost"] for outcome in outcomes), default=0),
        "updates_lost": sum(outcome["lost"] for outcome in outcomes),
        "median_notice_seconds": median_notice_seconds(outcomes),
        "last_attempt": last_run.message or "ended well",
        "seed": args.seed,
        "steps": steps,
    }
    return dataclasses.replace(baseline.record, parity=parity, provenance=provenance, loss=[])


def check_fault(injection: dict[str, Any], trainer_run: TrainerRun, ends_run: bool) -> dict[str, Any]:
    """Return the outcome of one fault. `wrong` is "" if the fault was injected and noticed as FAULTS requires.

    A fault that does not end the run is not checked here: the comparison of the whole training covers it.
    """
    fault = FAULTS[injection["fault"]]
    outcome = {
        "fault": injection["fault"],
        "update": injection["update"],
        "left": 0,
        "lost": 0,
        "seconds": None,
        "wrong": "",
    }
    if not ends_run:
        return outcome
    outcome["left"] = trainer_run.num_left
    if trainer_run.injected_at is None:
        return outcome | {"wrong": f"the fault was never injected: {trainer_run.message}"}
    if not fault.message_pattern:
        return outcome | {
            "seconds": trainer_run.all_ended_at - trainer_run.injected_at,
            "wrong": f"{trainer_run.num_left} processes did not end" if trainer_run.num_left else "",
        }
    if fault.corrupts:  # the corruption itself is noticed when the training is resumed
        is_reported = "ended by SIGKILL" in trainer_run.message
    else:
        is_reported = fault.is_reported_in(trainer_run.message, injection["rank"])
    is_noticed = trainer_run.status not in (0, None) and is_reported
    return outcome | {
        "seconds": trainer_run.ended_at - trainer_run.injected_at,
        "wrong": "" if is_noticed else f"exit status {trainer_run.status}: {trainer_run.message}",
    }


def choose_resume(
    run: Path,
    name: str,
    outcome: dict[str, Any],
    call: TrainCall,
    refused_folder: Path,
    generator: random.Random,
    limit_seconds: float,
) -> str:
    """Return what to resume from: the run, or the last good checkpoint if the fault corrupts the newest one.

    Adds the number of lost updates to `outcome`, and what went wrong.
    """
    resume, last_update = str(run), max(outcome["update"], len(logged_updates(run)))
    if FAULTS[name].corrupts:
        newest = checkpoints_of(run)[-1]
        corrupt_checkpoint(newest, FAULTS[name].corrupts, generator)
        refused = run_trainer(dataclasses.replace(call, resume=resume), refused_folder, limit_seconds)
        shutil.rmtree(refused_folder)
        if not FAULTS[name].is_reported_in(refused.message, 0):
            outcome["wrong"] = f"a corrupt checkpoint was not refused: {refused.message}"
        good = last_good(newest.path)
        assert good is not None
        resume = str(good.path)
    intact_steps = [checkpoint.metadata.step for checkpoint in checkpoints_of(run) if damage(checkpoint) is None]
    outcome["lost"] = last_update - max(intact_steps)
    if outcome["lost"] > SAVE_EVERY * (2 if FAULTS[name].corrupts else 1):
        outcome["wrong"] = outcome["wrong"] or f"{outcome['lost']} updates are lost"
    return resume


def median_notice_seconds(outcomes: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median seconds from each fault to the end of the run, by name of the fault."""
    seconds: dict[str, list[float]] = {}
    for outcome in outcomes:
        if outcome["seconds"] is not None:
            seconds.setdefault(outcome["fault"], []).append(outcome["seconds"])
    return {name: round(statistics.median(values), 2) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="ddp")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--injections", type=int, default=200)
    parser.add_argument("--minutes", type=float, help="inject no fault after this time")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds that a rank waits for another one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.injections < 1:
        parser.error(f"--injections {args.injections}: there is no fault to inject; give at least 1")
    folder = Path(tempfile.mkdtemp(prefix="everyrank-chaos-"))
    try:
        record = run_long_training(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(record.parity)
    print(record.provenance["long_run"])
    if args.json:
        write_records([record], args.json)


if __name__ == "__main__":
    main()
