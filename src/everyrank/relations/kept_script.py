"""What a script computes, as a trace that can be kept in a file and compared with a later version of the script.

The trace has the form of `parity.kept`, so `compare_kept` compares it. The script runs twice: what differs between the
two runs is not reproducible, and is left out or refused.
"""

from __future__ import annotations

import hashlib
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
from everyrank.relations.numbers import tolerance_of
from everyrank.relations.samples import tensors_of_batch
from everyrank.rerun import Imposed, RankRecording, ScriptHost, ScriptRecording

__all__ = ["script_trace", "trace_in_host"]

_SEED = 0  # of torch, numpy and random before the script starts, for a script that sets none
_BATCHES = 8  # whose samples are in the checksum


def script_trace(
    words: Sequence[str], processes: int, updates: int, timeout_seconds: float = 120.0, pretend_cuda: bool = False
) -> dict[str, Any]:
    """Run a script on `processes` ranks in float64, else in its own precision, and return what the file keeps.

    Raises `CannotRunError` if it does not run, `UsageError` if two runs of it give different losses.
    """
    with ScriptHost(words, timeout_seconds, pretend_cuda, processes) as host:
        return trace_in_host(host, words, processes, updates)


def trace_in_host(host: ScriptHost, words: Sequence[str], processes: int, updates: int) -> dict[str, Any]:
    """The same in a host that may run other scripts, too."""
    runs: list[ScriptRecording] = []
    for float64 in (True, False):
        runs = [_run(host, words, processes, updates, float64)]
        if not runs[0].trouble:
            runs.append(_run(host, words, processes, updates, float64))
            break
    for run in runs:
        if run.trouble:
            raise CannotRunError(f"the script does not run to its end: {run.trouble}")
    first, second = runs
    if not all(rank.updates for rank in first.ranks):
        raise CannotRunError("no rank has made an optimizer step, so there is nothing to keep")
    trace, again = (_trace(run, words) for run in (first, second))
    for update, (one, other) in enumerate(zip(trace["losses"], again["losses"], strict=False)):
        if one != other:
            raise UsageError(
                f"two runs of this script differ: the loss of update {update} is {one:.9g}, then {other:.9g}; seed its "
                "random numbers, for example torch.manual_seed(0)"
            )
    trace["evaluation"] = {
        name: value for name, value in trace["evaluation"].items() if again["evaluation"].get(name) == value
    }
    return trace


def _run(host: ScriptHost, words: Sequence[str], processes: int, updates: int, float64: bool) -> ScriptRecording:
    return host.run(
        processes,
        words=words,
        float64=float64,
        imposed=Imposed(seed=_SEED),
        updates=updates,
        detailed=updates,
        seconds=1e6,
    )


def _trace(run: ScriptRecording, words: Sequence[str]) -> dict[str, Any]:
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
            "script": Path(words[0]).name if words[0] != "-m" else words[1],
            "arguments": " ".join(words[2:] if words[0] == "-m" else words[1:]),
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
        "versions": _versions(words),
        "notes": [],
    }


def _tensors(ranks: Sequence[RankRecording], update: int, kind: str) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of all ranks: copies only once, and shards with their rank."""
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
    """{"number 1 of 'epoch # loss #' (2)": [value, 1]} for what rank 0 printed, whichever line of the script did."""
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
    """Of the samples of the first batches of each rank, in any order within a batch."""
    content = hashlib.blake2b(digest_size=16)
    for rank in ranks:
        for _, batch, _ in rank.batches[:_BATCHES]:
            for tensor in tensors_of_batch(batch):
                if tensor.dim():
                    rows = (
                        tensor.detach().double().flatten(1) if tensor.dim() > 1 else tensor.detach().double()[:, None]
                    )
                    sums = zip(rows.sum(1).tolist(), rows.abs().sum(1).tolist(), strict=True)
                    content.update(" ".join(sorted(f"{one:.4e} {other:.4e}" for one, other in sums)).encode())
    return content.hexdigest()


def _versions(words: Sequence[str]) -> dict[str, Any]:
    import torch

    script = find_script(list(words))
    folder = script.absolute().parent if script else Path.cwd()
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],  # noqa: S607
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        commit = done.stdout.strip() or None
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
