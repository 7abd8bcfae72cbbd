"""The checks that need a GPU, on a machine with one: layouts, host waits, memory, time, scripts.

    python benchmarks/gpu.py --out DIR                  # writes DIR/gpu.json, DIR/machine.json and logs
    python benchmarks/gpu.py --predict gpu.json --machine machine.json     # anywhere: adds the predictions of plan

Several ranks share the GPU: under gloo, and under nccl, which counts each as a host of its own. Equality is checked in
that way; speed is measured with one rank and nothing beside it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import gc
import json
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from everyrank.collectives.operations import OPERATIONS
from everyrank.errors import EveryrankError
from everyrank.launch import Launch, run_ranks
from everyrank.layout import parse_layout
from everyrank.measure.provenance import machine
from everyrank.plan.caching_allocator import replay
from everyrank.plan.hardware import host_cluster
from everyrank.plan.machine import read_machine
from everyrank.plan.pretend import first_sample, micro_batches_of, trace_step
from everyrank.plan.roofline import roofline_seconds
from everyrank.plan.traced import time_layout
from everyrank.strategies import prepare
from everyrank.workload import Source
from everyrank.workload.find import load
from everyrank.world import open_world

Rows = list[dict[str, Any]]
HERE = Path(__file__).parent
SCRIPTS = HERE / "gpu"
ZEROS = functools.partial(torch.zeros, device="cuda")

REPLICAS = "ddp ddp:precision=bf16 ddp:compress=powersgd zero1 fsdp fsdp:precision=bf16 fsdp:recompute fsdp:meta=true"
SPLIT = "tensor tensor:sequence=true context context:method=ulysses pipeline pipeline:schedule=gpipe"
SPLIT += " pipeline:schedule=zero-bubble local_sgd"
FOUR = "fsdp:replicate=2 fsdp:tensor=2 pipeline:shard=2 ddp:tensor=2 ddp:context=2"
ONE = "single single:precision=bf16 single:precision=fp16 single:recompute single:accumulate=2 single:compile fsdp ddp"

# name -> arguments of everyrank, and how many seconds it may take
VERIFY: dict[str, tuple[str, int]] = {
    "verify-digits-1": (f"verify digits --processes 1 --layout {ONE}", 200),
    "verify-text-1": (f"verify text --processes 1 --layout {ONE}", 200),
    "verify-digits-gloo-2": ("verify digits --processes 2 --layout ddp zero1 local_sgd ddp:batch_norm=local", 150),
    "verify-text-gloo-2": ("verify text --processes 2 --layout ddp zero1 local_sgd context:method=ulysses", 150),
    "verify-text-gloo-4": ("verify text --processes 4 --layout ddp zero1 context:method=ulysses", 150),
    "verify-digits-nccl-2": ("verify digits --processes 2 --backend nccl --layout ddp zero1 fsdp local_sgd", 200),
    "verify-replicas-nccl-2": (f"verify text --processes 2 --backend nccl --steps 6 --layout {REPLICAS}", 400),
    "verify-split-nccl-2": (f"verify text --processes 2 --backend nccl --steps 6 --layout {SPLIT}", 400),
    "verify-text-nccl-4": (f"verify text --processes 4 --backend nccl --steps 6 --layout {FOUR}", 400),
    "verify-experts-nccl-2": (
        "verify text --set experts=4 --processes 2 --backend nccl --steps 6 --layout expert fsdp ddp",
        200,
    ),
    "verify-server-nccl-2": ("verify text --processes 2 --backend nccl --steps 6 --layout parameter_server", 150),
}
COMMANDS: dict[str, tuple[str, int]] = {
    "doctor": ("doctor", 120),
    "train-save": (
        "train text --layout fsdp --processes 2 --backend nccl --steps 20 --save-every 10 --save-async --out {out}/a",
        150,
    ),
    "train-whole": ("train text --layout single --steps 30 --out {out}/b", 150),
    "audit-script": ("audit {scripts}/usual.py", 200),
    "port-script": ("port -o {out}/ported.py {scripts}/single.py", 200),
    "launch-hang": ("launch --processes 2 --timeout 15 {scripts}/hang.py", 120),
    "launch-fails": ("launch --processes 2 --timeout 15 {scripts}/fails.py", 120),
}
# after the others: it resumes the training of train-save
AFTER = {"train-resumed": ("train text --layout ddp --processes 2 --steps 30 --resume {out}/a --out {out}/c", 150)}
BENCH = {
    "bench-text-medium": "bench text-medium --processes 1 --trials 3 --steps 20 --layout single single:precision=bf16 "
    "single:compile,precision=bf16",
    "bench-digits": "bench digits --processes 1 --trials 3 --steps 30 --layout single single:precision=bf16",
}
WAITS = (
    *(("text", layout, 1) for layout in ("single", "single:precision=bf16", "single:precision=fp16")),
    *(("text", layout, 2) for layout in ("ddp", "zero1", "fsdp", "tensor", "context", "context:method=ulysses")),
    *(("text", layout, 2) for layout in ("pipeline", "local_sgd:every=1")),
    *(("digits", layout, 2) for layout in ("ddp", "fsdp")),
)
MEMORY = tuple(
    ("text-124m", layout, 2) for layout in ("ddp:precision=bf16", "zero1:precision=bf16", "fsdp:precision=bf16")
)
HALF = "precision=bf16"
STEPS: dict[str, tuple[str, ...]] = {
    "digits": ("single",),
    "text": ("single", f"single:{HALF}"),
    "text-medium": (
        "single",
        f"single:{HALF}",
        "single:precision=fp16",
        "single:recompute",
        f"single:{HALF},recompute",
    ),
    "text-124m": ("single", f"single:{HALF}", f"single:{HALF},recompute", f"single:{HALF},accumulate=2"),
}
COMM = {
    f"comm-{name}": (f"comm --op {name} --processes 2 --backend nccl --sizes 1KiB 1MiB --seconds 0.05", 60)
    for name in OPERATIONS
}


def everyrank(name: str, arguments: str, seconds: float, out: Path, *more: str) -> dict[str, Any]:
    """Run a command of everyrank; its row. The whole output is in DIR/logs/NAME.log."""
    words = [word.format(out=out, scripts=SCRIPTS) for word in [*arguments.split(), *more]]
    started = time.perf_counter()
    log = out / "logs" / f"{name}.log"
    with log.open("w") as file:
        try:
            command = [sys.executable, "-m", "everyrank", *words]
            status: int | str = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, timeout=seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = "timeout"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-6:])
    row = {"check": name, "command": f"everyrank {arguments}", "status": status}
    print(f"--- {name}: {status} in {time.perf_counter() - started:.0f} s\n{tail}", flush=True)
    return row | {"seconds": round(time.perf_counter() - started, 1), "tail": tail}


def verified(name: str, arguments: str, seconds: float, out: Path) -> list[dict[str, Any]]:
    """Run verify; the row of the command, and one for each layout."""
    path = out / f"{name}.json"
    rows = [everyrank(name, arguments, seconds, out, "--json", str(path))]
    for record in json.loads(path.read_text()) if path.exists() else []:
        parity, settings = record["parity"], record["provenance"].get("settings") or {}
        rows.append(
            {
                "check": "layout",
                "of": name,
                "workload": " ".join([record["workload"], *(f"{key}={value}" for key, value in settings.items())]),
                "layout": record["layout"],
                "backend": record["backend"],
                "ranks": record["world_size"],
                "status": parity["status"],
                "difference": parity["max_relative_difference"],
                "tolerance": parity["tolerance"],
                "compared": parity["scope"],
            }
        )
    path.unlink(missing_ok=True)
    return rows


def on_ranks(function: Any, ranks: int, *arguments: Any) -> Any:
    """Run a function on ranks that share the GPU, under nccl."""
    launch = Launch(processes=ranks, device="cuda", backend="nccl", timeout_seconds=100.0)
    return run_ranks(launch, function, *arguments)


def waits_on_rank(info: Any, name: str, text: str) -> dict[str, Any]:
    """Count the times that the host waits for the device in an update, by torch's own count, and where."""
    with open_world(info, Launch(processes=info.size, device="cuda", backend="nccl", timeout_seconds=100.0)) as world:
        workload = load(Source(name, {}, None))
        prepared = prepare(workload, parse_layout(text), world)
        batches = micro_batches_of(prepared, first_sample(workload), ZEROS)
        counts: list[int] = []
        places: list[str] = []
        for _ in range(3):
            prepared.step(batches)
        torch.cuda.synchronize()
        for _ in range(3):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                prepared.step(batches)
                torch.cuda.set_sync_debug_mode("default")
            waits = [one for one in caught if "called a synchronizing" in str(one.message)]
            counts.append(len(waits))
            places = sorted({f"{Path(one.filename).name}:{one.lineno}" for one in waits})
        return {"waits": counts, "places": places}


def memory_on_rank(info: Any, name: str, text: str) -> dict[str, Any]:
    """Return the peak of an update in bytes, and what the process has taken of the device."""
    launch = Launch(processes=info.size, device="cuda", backend="nccl", timeout_seconds=100.0)
    with open_world(info, launch) as world:
        return _measured(world, name, text, rounds=0)


def steps_on_rank(info: Any, name: str, texts: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return peak bytes and seconds of an update of each layout, one after the other in this process."""
    with open_world(info, Launch(processes=1, device="cuda", timeout_seconds=100.0)) as world:
        rows: list[dict[str, Any]] = []
        for text in texts:
            gc.collect()
            torch.cuda.empty_cache()
            rows.append({"layout": text} | _measured(world, name, text, rounds=5))
        return rows


def _measured(world: Any, name: str, text: str, rounds: int) -> dict[str, Any]:
    workload = load(Source(name, {}, None))
    sample = first_sample(workload)
    torch.cuda.reset_peak_memory_stats()
    start, start_reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    prepared = prepare(workload, parse_layout(text), world)
    batches = micro_batches_of(prepared, sample, ZEROS)
    for _ in range(2):
        prepared.step(batches)
    building = torch.cuda.max_memory_allocated() - start
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        prepared.step(batches)
    torch.cuda.synchronize()
    row: dict[str, Any] = {
        "global_batch": workload.global_batch,
        "allocated": torch.cuda.max_memory_allocated() - start,
        "allocated_first": building,
        "reserved": torch.cuda.max_memory_reserved() - start_reserved,
        "alive_before": start,
    }
    seconds: list[float] = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(10):
            prepared.step(batches)
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - started) / 10)
    return row | ({"seconds": statistics.median(seconds), "rounds": seconds} if seconds else {})


def about_on_rank(info: Any) -> dict[str, Any]:
    """Return the provenance."""
    with open_world(info, Launch(processes=1, device="cuda")) as world:
        free, total = torch.cuda.mem_get_info()
        return machine(world) | {"memory_total": total, "memory_free": free}


def attempt(row: dict[str, Any], function: Callable[..., Any], case: Any, ranks: int, *more: Any) -> dict[str, Any]:
    """Return the row with the result of the last rank, or with the error."""
    try:
        row = row | function(case, ranks, *more)[ranks - 1]
    except EveryrankError as error:
        row = row | {"error": str(error)[:500]}
    print(row, flush=True)
    return row


def beside_each_other(out: Path, chosen: Callable[[str], bool], keep: Callable[[Rows], None], jobs: int) -> None:
    """Run the checks that are not timed; those on ranks of this process one after the other, beside the commands."""
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for name, (text, limit) in VERIFY.items():
            if chosen(name):
                pool.submit(verified, name, text, limit, out).add_done_callback(lambda job: keep(job.result()))
        for name, (text, limit) in {**COMMANDS, **COMM}.items():
            if chosen(name):
                pool.submit(everyrank, name, text, limit, out).add_done_callback(lambda job: keep([job.result()]))
        for kind, cases, function in (("waits", WAITS, waits_on_rank), ("memory", MEMORY, memory_on_rank)):
            for workload, layout, ranks in cases if chosen(kind) else ():
                row = {"check": kind, "workload": workload, "layout": layout, "ranks": ranks}
                keep([attempt(row, on_ranks, function, ranks, workload, layout)])
    for name, (text, limit) in AFTER.items():
        if chosen(name):
            keep([everyrank(name, text, limit, out)])


def alone(out: Path, chosen: Callable[[str], bool], keep: Callable[[Rows], None]) -> None:
    """Run what is timed, one after the other."""
    if chosen("calibrate"):
        keep([everyrank("calibrate", "plan --calibrate {out}/machine.json", 200, out)])
    for name, texts in STEPS.items() if chosen("steps") else ():
        row = {"check": "steps", "workload": name}
        try:
            results = run_ranks(Launch(processes=1, device="cuda"), steps_on_rank, name, texts)[0]
        except EveryrankError as error:
            results = [{"error": str(error)}]
        print(row, results, flush=True)
        keep([row | result for result in results])
    for name, text in BENCH.items():
        if chosen(name):
            path = out / f"{name}.json"
            keep([everyrank(name, text, 300, out, "--json", str(path))])
            for record in json.loads(path.read_text()) if path.exists() else []:
                fields = ("workload", "layout", "step_seconds", "throughput_samples_per_second", "peak_memory_bytes")
                fields += ("breakdown_seconds", "ratio_to_single", "startup_seconds", "parity")
                keep([{"check": "time", "of": name} | {key: record[key] for key in fields}])
            path.unlink(missing_ok=True)


def predict(path: Path, machine_path: Path) -> None:
    """Add to each measured row the memory that `plan` traces and, for one rank, the seconds that it predicts.

    traced     peak bytes of an update; replayed: by the caching allocator's rules, without the workspace of cuBLAS
    predicted_seconds  with the calibration of the machine; roofline_seconds: with the kind of GPU only
    """
    result, measured = json.loads(path.read_text()), read_machine(machine_path)
    assert measured is not None
    cluster = host_cluster(measured.device, 1)
    for row in result["rows"]:
        if row["check"] not in ("steps", "memory") or isinstance(row.get("error"), str):  # a number: of a prediction
            continue
        workload, layout, ranks = (
            load(Source(row["workload"], {}, None)),
            parse_layout(row["layout"]),
            row.get("ranks", 1),
        )
        sample = first_sample(workload)
        traced = trace_step(workload, layout, ranks, 0, sample, on_gpu=True)
        row["traced"] = traced.peak_bytes
        row["replayed"] = dataclasses.asdict(replay(traced.events, traced.start))
        if "seconds" in row:
            row["roofline_seconds"] = sum(roofline_seconds(traced, layout.strategy, cluster).values())
            row["predicted_parts"] = time_layout(workload, layout, ranks, sample, measured, "nccl")
            row["predicted_seconds"] = sum(row["predicted_parts"].values())
            row["error"] = row["predicted_seconds"] / row["seconds"] - 1
        fields = ("workload", "layout", "ranks", "traced", "replayed", "allocated", "reserved", "error")
        print({key: row.get(key) for key in fields}, flush=True)
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")


def main() -> int:
    """Run the checks; 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-checks"))
    parser.add_argument("--predict", type=Path, help="a gpu.json, to which the predictions are added")
    parser.add_argument("--machine", type=Path, help="the machine.json that was measured with it")
    parser.add_argument("--only", nargs="+", default=[], help="names that begin so: verify, train, waits, bench, ...")
    parser.add_argument("--jobs", type=int, default=5, help="commands at the same time, of those that are not timed")
    args = parser.parse_args()
    if args.predict is not None:
        predict(args.predict, args.machine)
        return 0
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    about = run_ranks(Launch(processes=1, device="cuda"), about_on_rank)[0]
    rows: Rows = []
    result: dict[str, Any] = {
        "command": "python benchmarks/gpu.py",
        "provenance": about | {"date": f"{datetime.now(UTC):%Y-%m-%d}"},
        "rows": rows,
    }
    writing = threading.Lock()

    def keep(more: Rows) -> None:
        with writing:
            rows.extend(more)
            (args.out / "gpu.json").write_text(json.dumps(result, indent=1, default=str) + "\n")

    def chosen(name: str) -> bool:
        return not args.only or any(name.startswith(start) for start in args.only)

    beside_each_other(args.out, chosen, keep, args.jobs)
    alone(args.out, chosen, keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
