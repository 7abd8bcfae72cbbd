"""Checks whether a workload fits into the memory of this machine, as `everyrank plan` traces it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from everyrank.doctor.results import CheckResult, absent, ok, problem, warning
from everyrank.errors import UsageError
from everyrank.workload import Source

if TYPE_CHECKING:
    from everyrank.plan.hardware import Cluster

__all__ = ["check_memory", "memory_results"]


def check_memory(
    source: Source,
    command: str,
    device: str | None,
    processes: int | None,
    layouts: Sequence[str],
    advance: Callable[[str], None],
) -> list[CheckResult]:
    """Return for each layout whether it fits on the GPUs of this machine, or on its CPU with two ranks.

    `command` is the workload as typed in a shell. `device` and `processes` are those that the user gives. Raises
    `UsageError` for a wrong workload or layout.
    """
    from everyrank.plan.traced import answer_workload
    from everyrank.workload.find import load

    advance("memory")
    machine = _this_machine(device, processes)
    return memory_results(answer_workload(load(source), source.place, command, machine, layouts))


def memory_results(answer: Mapping[str, Any]) -> list[CheckResult]:
    """Return a result for each layout in the answer of `everyrank plan`."""
    memory = answer["cluster"]["memory_bytes"]
    results: list[CheckResult] = []
    for row in answer["layouts"]:
        if row["verdict"] == "not possible":
            results.append(absent(row["layout"], row["reason"]))
            continue
        text = f"{row['verdict']}: {_gib(row['allocated_bytes'])} of {_gib(memory)} for each rank"
        change = row.get("change", {})
        fix = f"{change['what']}: {change['command']}" if "command" in change else change.get("what", row["note"])
        if row["verdict"] == "fits":
            results.append(ok(row["layout"], text))
        else:
            results.append((problem if row["verdict"] == "does not fit" else warning)(row["layout"], text, fix))
    return results


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"


def _this_machine(device: str | None, processes: int | None) -> Cluster:
    """Return the GPUs of this machine with the memory that each rank has of them, or its CPU."""
    import torch

    from everyrank.plan.hardware import find_gpu, host_cluster

    if device == "cpu" or not torch.cuda.is_available():
        return host_cluster("cpu", processes or 2)
    num_devices = torch.cuda.device_count()
    properties, ranks = torch.cuda.get_device_properties(0), processes or num_devices
    ranks_per_device = -(-ranks // num_devices)  # more ranks than GPUs share them
    try:
        gpu = find_gpu(properties.name)
    except UsageError:  # a GPU that plan does not know: only its memory matters here
        gpu = replace(host_cluster("cpu", 1).gpu, name=properties.name)
    memory = properties.total_memory // ranks_per_device
    return replace(host_cluster("cpu", ranks), gpu=replace(gpu, memory=memory))
