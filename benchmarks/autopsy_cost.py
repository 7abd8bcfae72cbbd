"""What it costs that ranks can be asked why they hang, and are compared while they train: as a ratio of the step time.

Run: python benchmarks/autopsy_cost.py [--rounds 40] [--json F]

Two ranks under DistributedDataParallel on shm and on gloo, a small model (the hardest case: most collectives a second).
In each round the same updates run with and without the ring of collectives and the thread that answers, in turns that
swap; ratios are of the same round. torch's Flight Recorder, which gloo and nccl fill, is on in both: torch has it on by
itself. A comparison of the ranks is timed alone, and divided by the seconds between two of them. On a busy machine the
ratio is noise; so what is added is timed by itself, too: one note in the ring, and one look of the thread.
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
    """Seconds of an update, without and with, by round, of the slower rank; seconds of a comparison."""
    with open_world(info, launch) as world:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
        optimizer, inputs = torch.optim.AdamW(model.parameters()), torch.randn(16, 64)

        def updates() -> float:
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(UPDATES):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            seconds = torch.tensor([(time.perf_counter() - begun) / UPDATES], dtype=torch.float64)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            return float(seconds)

        updates()
        times: dict[str, list[float]] = {"without": [], "with": []}
        for number in range(rounds):
            for how in ("without", "with")[:: 1 if number % 2 else -1]:
                switch(how == "with")
                times[how].append(updates())
        watch, looks = StragglerWatch(open_mesh(parse_layout("ddp"), world)), list[float]()
        for _ in range(20):
            updates() if not looks else None
            dist.barrier()
            begun = time.perf_counter()
            watch.look()
            looks.append(time.perf_counter() - begun)
        return {**times, "look": looks, **added()}


def added() -> dict[str, float]:
    """CPU seconds of one note in the ring, and of one look of the thread: the least of five turns."""
    state, tensors = current_state(), [torch.ones(8)]
    assert state is not None
    watch_for_hangs(state, 300.0, prints=False)  # as a script has it

    def note() -> None:
        RECENT_CALLS.record("all_reduce", "alone", tensors)

    def look() -> None:
        state.on_look(state._write_stack(None)["frames"])

    found = {}
    for name, function, count in (("note_seconds", note, 2000), ("thread_look_seconds", look, 50)):
        turns = []
        for _ in range(5):
            begun = time.thread_time()
            for _ in range(count):
                function()
            turns.append((time.thread_time() - begun) / count)
        found[name] = min(turns)
    return found


def switch(is_on: bool) -> None:
    """Turn the ring and the thread on or off."""
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--backends", nargs="+", default=["shm", "gloo"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for backend in args.backends:
        launch = Launch(processes=2, device="cpu", backend=backend)
        found = run_ranks(launch, measure, launch, args.rounds)[0]
        ratios = sorted(on / off for on, off in zip(found["with"], found["without"], strict=True))
        # 95% of the median, by order statistics
        half = int(0.98 * len(ratios) ** 0.5)
        low, high = ratios[max(0, len(ratios) // 2 - half)], ratios[min(len(ratios) - 1, len(ratios) // 2 + half)]
        row = {
            "backend": backend,
            "step_seconds": statistics.median(found["without"]),
            "ratio": {"median": statistics.median(ratios), "low": low, "high": high},
            "comparison_seconds": statistics.median(found["look"]),
            "comparison_share": statistics.median(found["look"]) / _WINDOW_SECONDS,
            "note_seconds": found["note_seconds"],
            "thread_share": found["thread_look_seconds"] / (2 * _POLL_SECONDS),
        }
        print(
            f"{backend}: a step of {1e3 * row['step_seconds']:.2f} ms takes {row['ratio']['median']:.3f} times as long "
            f"({low:.3f} to {high:.3f}, {args.rounds} rounds); a note takes {1e6 * row['note_seconds']:.1f} us, "
            f"the thread {row['thread_share']:.3%} of a core, a comparison {1e3 * row['comparison_seconds']:.1f} ms, "
            f"{row['comparison_share']:.2%} of the {_WINDOW_SECONDS:g} s between two",
            flush=True,
        )
        rows.append(row)
    if args.json:
        source = {"torch": torch.__version__, "cores": os.cpu_count(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
        content = {"rows": rows, "rounds": args.rounds, "updates": UPDATES, "provenance": source}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
