"""Measure how much the diagnosis of hangs and stragglers slows down a training, relative to the step time.

Run: python benchmarks/autopsy_cost.py [--rounds 40] [--json F]

Two ranks train with DistributedDataParallel on shm and on gloo. The model is small, because the most collectives a
second are the worst case. In each round the same updates run with and without the list of recent collectives and the
thread that answers requests, in alternating order. Ratios divide times of the same round. torch's Flight Recorder is on
in both, as by default.

A comparison of the ranks is timed separately, and divided by the seconds between two comparisons. On a busy machine the
ratio is mostly noise. Two things are therefore also timed separately: recording a collective, and a poll of the thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from everyrank.backends import RECENT_CALLS
from everyrank.launch import Launch, RankInfo, run_ranks
from everyrank.launch.autopsy import current_state
from everyrank.launch.autopsy.rank_state import _POLL_SECONDS
from everyrank.layout import parse_layout
from everyrank.parallel.mesh import open_mesh
from everyrank.script.watching import _prepare as watch_for_hangs
from everyrank.train.stragglers import _WINDOW_SECONDS, StragglerWatch
from everyrank.world import open_world

UPDATES = 200


def measure(info: RankInfo, launch: Launch, rounds: int) -> dict[str, Any]:
    """Return seconds: of an update on the slower rank by round and mode, of a comparison, and those of `time_parts`."""
    with open_world(info, launch) as world:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
        optimizer, inputs = torch.optim.AdamW(model.parameters()), torch.randn(16, 64)

        def time_update() -> float:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(UPDATES):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            seconds = torch.tensor([(time.perf_counter() - start) / UPDATES], dtype=torch.float64)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            return float(seconds)

        time_update()  # warm-up
        times: dict[str, list[float]] = {"without": [], "with": []}
        for number in range(rounds):
            for mode in ("without", "with")[:: 1 if number % 2 else -1]:
                switch_diagnosis(mode == "with")
                times[mode].append(time_update())
        watch, comparisons = StragglerWatch(open_mesh(parse_layout("ddp"), world)), list[float]()
        time_update()
        for _ in range(20):
            dist.barrier()
            start = time.perf_counter()
            watch.compare()
            comparisons.append(time.perf_counter() - start)
        return {**times, "look": comparisons, **time_parts()}


def time_parts() -> dict[str, float]:
    """Return CPU seconds of recording a collective and of a poll of the thread, each the minimum of five trials."""
    state, tensors = current_state(), [torch.ones(8)]
    assert state is not None
    watch_for_hangs(state, 300.0, prints=False)  # as for a script

    def record_collective() -> None:
        RECENT_CALLS.record("all_reduce", "alone", tensors)

    def poll() -> None:
        state.on_sample(state._write_stack(None)["frames"])

    minimum_seconds = {}
    for name, function, count in (("note_seconds", record_collective, 2000), ("thread_look_seconds", poll, 50)):
        trials = []
        for _ in range(5):
            start = time.thread_time()
            for _ in range(count):
                function()
            trials.append((time.thread_time() - start) / count)
        minimum_seconds[name] = min(trials)
    return minimum_seconds


def switch_diagnosis(is_on: bool) -> None:
    """Turn the recording of collectives and the thread on or off."""
    state = current_state()
    assert state is not None
    if is_on:
        RECENT_CALLS.__dict__.pop("record", None)
        state.has_ended = False
        state.thread = threading.Thread(target=state._run, daemon=True)
        state.thread.start()
    else:
        RECENT_CALLS.record = lambda *_: None
        state.has_ended = True
        state.thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--backends", nargs="+", default=["shm", "gloo"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for backend in args.backends:
        launch = Launch(processes=2, device="cpu", backend=backend)
        seconds = run_ranks(launch, measure, launch, args.rounds)[0]
        ratios = sorted(on / off for on, off in zip(seconds["with"], seconds["without"], strict=True))
        # the 95% confidence interval of the median, by order statistics
        half_width, middle = int(0.98 * len(ratios) ** 0.5), len(ratios) // 2
        low, high = ratios[max(0, middle - half_width)], ratios[min(len(ratios) - 1, middle + half_width)]
        row = {
            "backend": backend,
            "step_seconds": statistics.median(seconds["without"]),
            "ratio": {"median": statistics.median(ratios), "low": low, "high": high},
            "comparison_seconds": statistics.median(seconds["look"]),
            "comparison_share": statistics.median(seconds["look"]) / _WINDOW_SECONDS,
            "note_seconds": seconds["note_seconds"],
            "thread_share": seconds["thread_look_seconds"] / (2 * _POLL_SECONDS),
        }
        print(
            f"{backend}: a step of {1e3 * row['step_seconds']:.2f} ms takes {row['ratio']['median']:.3f} times as long "
            f"({low:.3f} to {high:.3f}, {args.rounds} rounds). Recording a collective takes "
            f"{1e6 * row['note_seconds']:.1f} us. The thread uses {row['thread_share']:.3%} of a core. A comparison "
            f"takes {1e3 * row['comparison_seconds']:.1f} ms, {row['comparison_share']:.2%} of the "
            f"{_WINDOW_SECONDS:g} s between two comparisons.",
            flush=True,
        )
        rows.append(row)
    if args.json:
        provenance = {"torch": torch.__version__, "cores": os.cpu_count(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
        content = {"rows": rows, "rounds": args.rounds, "updates": UPDATES, "provenance": provenance}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
