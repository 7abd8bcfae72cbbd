"""Saves the results of a script as a trace in a file, to compare a later version of the script with it.

The trace has the format of `parity.kept`, so `compare_kept` compares it. The script runs twice. Results that differ
between the two runs are not reproducible: such printed numbers are left out, and such losses are an error.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from everyrank.audit.script import find_script
from everyrank.errors import CannotRunError, UsageError
from everyrank.parity.kept import FORMAT, elements
from everyrank.relations.numbers import as_reals, tolerance_of
from everyrank.relations.samples import tensors_of_batch
from everyrank.rerun import Imposed, RankRecording, ScriptHost, ScriptRecording

__all__ = ["script_trace", "trace_in_host"]

_SEED = 0  # of torch, numpy and random before the script starts, for a script that sets no seed
_NO_LIMIT_SECONDS = 1e6  # only the number of updates ends a run, so that both runs have the same updates
_BATCHES = 8  # number of batches in the checksum


def script_trace(
    python_args: Sequence[str], processes: int, updates: int, timeout_seconds: float = 120.0, pretend_cuda: bool = False
) -> dict[str, Any]:
    """Run a script on `processes` ranks, in float64 if possible, and return the trace.

    Raises `CannotRunError` if the script fails, and `UsageError` if two runs give different losses.
    """
    with ScriptHost(python_args, timeout_seconds, pretend_cuda, processes) as host:
        return trace_in_host(host, python_args, processes, updates)


def trace_in_host(host: ScriptHost, python_args: Sequence[str], processes: int, updates: int) -> dict[str, Any]:
    """Return the trace of a script in a host that may run other scripts, too."""
    runs: list[ScriptRecording] = []
    for _ in range(2):
        run = host.run_in_float64(
            processes, python_args=python_args, imposed=Imposed(seed=_SEED), updates=updates, seconds=_NO_LIMIT_SECONDS
        )
        if run.failure:
            raise CannotRunError(f"the script does not run to its end: {run.failure}")
        runs.append(run)
    without_updates = [number for number, rank in enumerate(runs[0].ranks) if not rank.updates]
    if without_updates:
        ranks_text = (
            "no rank has" if len(without_updates) == len(runs[0].ranks) else f"rank {without_updates[0]} has not"
        )
        raise CannotRunError(f"{ranks_text} made an optimizer step, so there is nothing to compare")
    trace, second_trace = (_trace(run, python_args) for run in runs)
    for update, (first_loss, second_loss) in enumerate(zip(trace["losses"], second_trace["losses"], strict=False)):
        if math.isnan(first_loss) and math.isnan(second_loss):
            raise CannotRunError(
                f"the loss of update {update} is NaN, so nothing can be compared with it; find the cause first: "
                "torch.autograd.set_detect_anomaly(True)"
            )
        if first_loss != second_loss:
            raise UsageError(
                f"two runs of this script differ: the loss of update {update} is {first_loss:.9g}, then "
                f"{second_loss:.9g}; seed its random numbers, for example torch.manual_seed(0)"
            )
    trace["evaluation"] = {
        name: value for name, value in trace["evaluation"].items() if second_trace["evaluation"].get(name) == value
    }
    return trace


def _trace(run: ScriptRecording, python_args: Sequence[str]) -> dict[str, Any]:
    ranks = run.ranks
    count = min(len(rank.updates) for rank in ranks)
    losses = [[sum(rank.updates[update].losses) for rank in ranks] for update in range(count)]
    initial = dict(_tensors(ranks, 0, "before"))
    gradients = dict(_tensors(ranks, 0, "gradients"))
    final = dict(_tensors(ranks, count - 1, "after"))
    tolerance = tolerance_of(list(initial.values())) or 5e-2
    return {
        "format": FORMAT,
        "experiment": {
            "script": Path(python_args[0]).name if python_args[0] != "-m" else python_args[1],
            "arguments": " ".join(python_args[2:] if python_args[0] == "-m" else python_args[1:]),
            "ranks": len(ranks),
            "updates": count,
            "tensors": {name: list(tensor.shape) for name, tensor in final.items()},
            "training data": _data_checksum(ranks),
        },
        "losses": [sum(values) / len(values) for values in losses],
        "counts": [float(sum(len(rank.updates[update].losses) for rank in ranks)) for update in range(count)],
        "loss_tolerances": [tolerance] * count,
        "evaluation": _printed_numbers(ranks),
        "initial": {name: elements(tensor) for name, tensor in initial.items()},
        "gradients": {name: [abs(value) for value in elements(tensor)] for name, tensor in gradients.items()},
        "final": {name: elements(tensor) for name, tensor in final.items()},
        "final_tolerances": {
            name: tolerance * max(1.0, float(tensor.abs().max())) if tensor.numel() else tolerance
            for name, tensor in final.items()
        },
        "versions": _versions(python_args),
        "notes": [],
    }


def _tensors(ranks: Sequence[RankRecording], update: int, kind: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of all ranks: equal copies once, and different tensors with their rank."""
    first = {name: tensor for name, tensor in getattr(ranks[0].updates[update], kind).items() if tensor is not None}
    yield from first.items()
    for number, rank in enumerate(ranks[1:], 1):
        for name, tensor in getattr(rank.updates[update], kind).items():
            if tensor is None:
                continue
            copy = first.get(name)
            if copy is None or copy.shape != tensor.shape or not bool((copy == tensor).all()):
                yield f"{name} on rank {number}", tensor


def _printed_numbers(ranks: Sequence[RankRecording]) -> dict[str, list[float]]:
    """{"number 1 of 'epoch # loss #' (2)": [value, 1]} for the numbers that rank 0 printed, by their text."""
    numbers: dict[str, list[float]] = {}
    seen = Counter[str]()
    for line in ranks[0].printed:
        pattern = re.sub(r"[-+]?\d[\d.]*(e[-+]?\d+)?", "#", line.text.strip())[:60]
        seen[pattern] += 1
        for index, value in enumerate(line.numbers):
            if abs(value) < float("inf"):
                numbers[f"number {index + 1} of {pattern!r} ({seen[pattern]})"] = [value, 1.0]
    return numbers


def _data_checksum(ranks: Sequence[RankRecording]) -> str:
    """A checksum of the samples of each rank's first batches, independent of the order within a batch."""
    content = hashlib.blake2b(digest_size=16)
    for rank in ranks:
        for _, batch, _ in rank.batches[:_BATCHES]:
            for tensor in tensors_of_batch(batch):
                if tensor.dim():
                    numbers = as_reals(tensor.detach())
                    rows = numbers.flatten(1) if numbers.dim() > 1 else numbers[:, None]
                    sums = zip(rows.sum(1).tolist(), rows.abs().sum(1).tolist(), strict=True)
                    content.update(
                        " ".join(sorted(f"{row_sum:.4e} {absolute_sum:.4e}" for row_sum, absolute_sum in sums)).encode()
                    )
    return content.hexdigest()


def _versions(python_args: Sequence[str]) -> dict[str, Any]:
    import torch

    script = find_script(list(python_args))
    folder = script.absolute().parent if script else Path.cwd()
    try:
        completed = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],  # noqa: S607
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        commit = completed.stdout.strip() or None
    except OSError:
        commit = None
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": platform.processor() or platform.machine(),
        "threads_per_rank": os.environ.get("OMP_NUM_THREADS"),
        "accelerator": None,
    }
