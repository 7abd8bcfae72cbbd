"""Checks that need a GPU, on a machine with one GPU: layouts, host waits, memory, time, scripts, recipes, ports.

    python benchmarks/gpu.py --out DIR                  # writes DIR/gpu.json, DIR/machine.json and logs
    python benchmarks/gpu.py --predict gpu.json --machine machine.json   # on any machine: adds the predictions of plan

Several ranks share the GPU, under gloo or under nccl. nccl refuses two ranks of one host on one GPU, so each rank
says that it is on another host. Layouts, recipes and ports are compared in this way. Speed is measured with one rank,
while nothing else runs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import gc
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from startup import free_port

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

# These start under torchrun and print their losses.
RECIPES = "ddp_torchrun ddp_amp ddp_accumulate ddp_compressed ddp_syncbn ddp_uneven distributed_evaluation zero1"
RECIPES += " local_sgd fsdp tensor context contrastive expert pipeline iterable_sharding weighted_sampler"
RECIPES += " checkpoint_resume"
PORTS = {"port": (), "port-accelerate": ("--to", "accelerate"), "port-fabric": ("--to", "fabric")}

# check -> (arguments of everyrank, timeout in seconds)
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
# These run after the other commands, because they resume the training of train-save.
AFTER = {"train-resumed": ("train text --layout ddp --processes 2 --steps 30 --resume {out}/a --out {out}/c", 150)}
# These need more memory than an H200 has. The error names the smallest change that fits. They run alone, because they
# take all memory of the GPU.
TOO_LARGE = {
    "too-large-train": ("train text-124m --set batch=256 --steps 2 --layout single --out {out}/d", 200),
    "too-large-bench": (
        "bench text-124m --set batch=256 --processes 1 --trials 1 --steps 2 "
        "--layout single single:precision=bf16,recompute",
        300,
    ),
}
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
EXPANDABLE = "expandable_segments:True"
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
    """Run a command of everyrank and return its row. The whole output is in DIR/logs/NAME.log."""
    command = [sys.executable, "-m", "everyrank"]
    command += [word.format(out=out, scripts=SCRIPTS) for word in [*arguments.split(), *more]]
    started = time.perf_counter()
    log = out / "logs" / f"{name}.log"
    with log.open("w") as file:
        try:
            status: int | str = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, timeout=seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = "timeout"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-6:])
    row = {"check": name, "command": f"everyrank {arguments}", "status": status}
    print(f"--- {name}: {status} in {time.perf_counter() - started:.0f} s\n{tail}", flush=True)
    return row | {"seconds": round(time.perf_counter() - started, 1), "tail": tail}


def command_row(name: str, arguments: str, seconds: float, out: Path) -> Rows:
    """Run a command of everyrank. Return its row."""
    return [everyrank(name, arguments, seconds, out)]


def verify(name: str, arguments: str, seconds: float, out: Path) -> list[dict[str, Any]]:
    """Run verify. Return the row of the command, and one for each layout."""
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
    """Return how often the host waits for the device in each of three updates, by torch's own count, and where."""
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
            waits = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
            counts.append(len(waits))
            places = sorted({f"{Path(warning.filename).name}:{warning.lineno}" for warning in waits})
        return {"waits": counts, "places": places}


def memory_on_rank(info: Any, name: str, text: str) -> dict[str, Any]:
    """Return the bytes that an update allocates and reserves at its peak."""
    launch = Launch(processes=info.size, device="cuda", backend="nccl", timeout_seconds=100.0)
    with open_world(info, launch) as world:
        return _measured(world, name, text, rounds=0)


def steps_on_rank(info: Any, name: str, texts: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return peak bytes and seconds of an update of each layout. The layouts run one after the other."""
    with open_world(info, Launch(processes=1, device="cuda", timeout_seconds=100.0)) as world:
        rows: list[dict[str, Any]] = []
        for text in texts:
            gc.collect()
            torch.cuda.empty_cache()
            rows.append({"layout": text} | _measured(world, name, text, rounds=5))
        return rows


def _measured(world: Any, name: str, text: str, rounds: int) -> dict[str, Any]:
    """Return peak bytes of an update, and the median seconds of `rounds` measurements of ten updates each."""
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


def provenance_on_rank(info: Any) -> dict[str, Any]:
    """Return the provenance, with the memory of the GPU in bytes."""
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
    """Run the checks that are not timed, `jobs` commands at the same time.

    Host waits and memory are counted one after the other in the meantime, by ranks that this process starts.
    """
    jobs_by_name: dict[str, Callable[[], Rows]] = {
        **{f"recipe-{name}": functools.partial(compare_recipe, name) for name in RECIPES.split()},
        **{f"ported-{name}": functools.partial(compare_port, name, options, out) for name, options in PORTS.items()},
        **{
            name: functools.partial(command_row, name, text, limit, out)
            for name, (text, limit) in {**COMMANDS, **COMM}.items()
        },
        **{name: functools.partial(verify, name, text, limit, out) for name, (text, limit) in VERIFY.items()},
    }
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for name, job in jobs_by_name.items():
            if chosen(name):
                pool.submit(job).add_done_callback(lambda future: keep(future.result()))
        for kind, cases, function in (("waits", WAITS, waits_on_rank), ("memory", MEMORY, memory_on_rank)):
            for workload, layout, ranks in cases if chosen(kind) else ():
                row = {"check": kind, "workload": workload, "layout": layout, "ranks": ranks}
                keep([attempt(row, on_ranks, function, ranks, workload, layout)])
    for name, (text, limit) in AFTER.items():
        if chosen(name):
            keep([everyrank(name, text, limit, out)])


def alone(out: Path, chosen: Callable[[str], bool], keep: Callable[[Rows], None]) -> None:
    """Run the checks that are timed, and those that fill the GPU, one after the other."""
    if chosen("calibrate"):
        keep([everyrank("calibrate", "plan --calibrate {out}/machine.json", 200, out)])
    for name, texts in STEPS.items() if chosen("steps") else ():
        keep(_steps({"check": "steps", "workload": name}, name, texts))
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = EXPANDABLE  # the ranks read it when they start
    for name, texts in STEPS.items() if chosen("expandable") else ():
        keep(_steps({"check": "expandable", "workload": name, "allocator": EXPANDABLE}, name, texts))
    del os.environ["PYTORCH_CUDA_ALLOC_CONF"]
    for name, text in BENCH.items():
        if chosen(name):
            path = out / f"{name}.json"
            keep([everyrank(name, text, 300, out, "--json", str(path))])
            for record in json.loads(path.read_text()) if path.exists() else []:
                fields = ("workload", "layout", "step_seconds", "throughput_samples_per_second", "peak_memory_bytes")
                fields += ("breakdown_seconds", "ratio_to_single", "startup_seconds", "parity")
                keep([{"check": "time", "of": name} | {key: record[key] for key in fields}])
            path.unlink(missing_ok=True)
    for name, (text, limit) in TOO_LARGE.items():
        if chosen(name):
            keep([everyrank(name, text, limit, out)])


def _steps(row: dict[str, Any], name: str, texts: tuple[str, ...]) -> Rows:
    """Return a row for each layout, or one with the error."""
    try:
        results = run_ranks(Launch(processes=1, device="cuda"), steps_on_rank, name, texts)[0]
    except EveryrankError as error:
        results = [{"error": str(error)}]
    print(row, results, flush=True)
    return [row | result for result in results]


def compare_recipe(name: str) -> Rows:
    """Run a recipe on two ranks of the GPU under nccl and on two of the CPU under gloo; compare its losses."""
    outputs: list[str] = []
    for on_gpu in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / f"{name}.py"
            command = [sys.executable, "-m", "everyrank", "new", name, str(script)]
            subprocess.run(command, check=True, capture_output=True)
            outputs.append(run_script(script, 2, "--float64", on_gpu=on_gpu))
    row = {"check": "recipe", "recipe": name, "ranks": 2}
    return _compared(row, outputs[1], outputs[0])


def compare_port(name: str, options: tuple[str, ...], out: Path) -> Rows:
    """Port single.py without its dropout; compare the output of the port on one rank of the GPU and on two ranks."""
    row = {"check": "ported", "port": name, "ranks": 2}
    with tempfile.TemporaryDirectory() as folder:
        script, port = Path(folder) / "script.py", Path(folder) / "port.py"
        script.write_text((SCRIPTS / "single.py").read_text().replace("nn.Dropout(0.1), ", ""))
        ported = everyrank(name, f"port -o {port} {script}", 250, out, *options)
        if not port.exists():
            return [row | {"status": "no port", "tail": ported["tail"]}]
        output_of_one = run_script(port, 1, on_gpu=True)
        output = run_script(port, 2, on_gpu=True)
    return _compared(row, output, output_of_one)


def run_script(script: Path, ranks: int, *arguments: str, on_gpu: bool) -> str:
    """Start a script with torchrun, each rank as a host of its own, and return what rank 0 prints.

    Ends with the last lines of rank 0's errors where the script failed.
    """
    port = free_port()
    processes: list[subprocess.Popen[str]] = []
    for rank in range(ranks):
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        environment |= {"NCCL_HOSTID": f"rank {rank}"} | ({} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""})
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(ranks), "--node-rank", str(rank)]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(port), script.name, *arguments]
        pipes: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "start_new_session": True,
        }
        processes.append(subprocess.Popen(command, cwd=script.parent, env=environment, **pipes))
    with concurrent.futures.ThreadPoolExecutor(ranks) as pool:
        outputs = list(pool.map(_communicate, processes))
    return outputs[0] + "".join("" if process.returncode == 0 else "\nfailed" for process in processes)


def _communicate(process: subprocess.Popen[str]) -> str:
    try:
        output, errors = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
    return output if process.returncode == 0 else output + "\n".join(errors.splitlines()[-30:])


def _numbers(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+(?:e-?\d+)?", output)]


def _compared(row: dict[str, Any], output: str, expected_output: str) -> Rows:
    """Return the row, with the number of printed values and their largest relative difference."""
    numbers, expected = _numbers(output), _numbers(expected_output)
    if "\nfailed" in output + expected_output or not expected or len(numbers) != len(expected):
        row |= {"status": "failed", "tail": output[-1500:], "numbers": [len(numbers), len(expected)]}
    else:
        pairs = zip(numbers, expected, strict=True)
        row |= {"status": "ran", "numbers": len(numbers)}
        row["difference"] = max(abs(number - other) / max(abs(other), 1e-300) for number, other in pairs)
    print(row, flush=True)
    return [row]


def predict(path: Path, machine_path: Path) -> None:
    """Add to each measured row the memory that `plan` traces and, for one rank, the seconds that it predicts.

    traced     peak bytes of an update; replayed: by the caching allocator's rules, without the workspace of cuBLAS
    predicted_seconds  with the calibration of the machine; roofline_seconds: with the kind of GPU only
    """
    result, measured = json.loads(path.read_text()), read_machine(machine_path)
    assert measured is not None
    cluster = host_cluster(measured.device, 1)
    traces: dict[tuple[str, str, int], Any] = {}  # the rows with expandable segments repeat layouts of the others
    for row in result["rows"]:
        has_failed = isinstance(row.get("error"), str)  # a number is the error of a prediction
        if row["check"] not in ("steps", "expandable", "memory") or has_failed:
            continue
        key = row["workload"], row["layout"], row.get("ranks", 1)
        workload, layout, ranks = load(Source(key[0], {}, None)), parse_layout(key[1]), key[2]
        sample = first_sample(workload)
        traced = traces[key] = traces.get(key) or trace_step(workload, layout, ranks, 0, sample, on_gpu=True)
        row["traced"] = traced.peak_bytes
        expandable = row["check"] == "expandable"
        replayed = replay(traced.events, traced.ends, expandable_segments=expandable)
        building, allocated = max(replayed.peaks[:3]), max(replayed.peaks[3:])
        row["replayed"] = {"building": building, "allocated": allocated, "reserved": replayed.reserved}
        if row["check"] == "steps":
            row["roofline_seconds"] = sum(roofline_seconds(traced, layout.strategy, cluster).values())
            row["predicted_parts"] = time_layout(workload, layout, ranks, sample, measured, "nccl")
            row["predicted_seconds"] = sum(row["predicted_parts"].values())
            row["error"] = row["predicted_seconds"] / row["seconds"] - 1
        fields = ("workload", "layout", "ranks", "traced", "replayed", "allocated", "reserved", "error")
        print({key: row.get(key) for key in fields}, flush=True)
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")


def main() -> int:
    """Run the checks and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-checks"))
    parser.add_argument("--predict", type=Path, help="a gpu.json, to which the predictions are added")
    parser.add_argument("--machine", type=Path, help="the machine.json that was measured with it")
    parser.add_argument(
        "--only", nargs="+", default=[], help="the checks whose names begin with these: verify, train, bench, ..."
    )
    parser.add_argument("--jobs", type=int, default=5, help="number of untimed commands that run at the same time")
    args = parser.parse_args()
    if args.predict is not None:
        predict(args.predict, args.machine)
        return 0
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    provenance = run_ranks(Launch(processes=1, device="cuda"), provenance_on_rank)[0]
    rows: Rows = []
    result: dict[str, Any] = {
        "command": "python benchmarks/gpu.py",
        "provenance": provenance | {"date": f"{datetime.now(UTC):%Y-%m-%d}"},
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
