"""A whole run: hours, money and energy, with the time that checkpoints and failures take."""

from __future__ import annotations

from dataclasses import dataclass

from everyrank.plan.hardware import Cluster
from everyrank.runs import optimal_interval_seconds

__all__ = ["WholeRun", "predict_run"]

_STORAGE = 2e9  # bytes a second that a node writes to shared storage
_RESTART = 600.0  # seconds from a failure to the first update after it
_SHARE_OF_WATTS = 0.85  # of the thermal design power, that a training draws
_OVERHEAD = 1.5  # of a node and its cooling over its GPUs' watts


@dataclass(frozen=True)
class WholeRun:
    """What a run takes.

    hours        with checkpoints and failures; goodput: the share of them that trains
    save_every   seconds between checkpoints
    gpu_hours, money, energy  over all GPUs; energy in kWh
    assumptions  each as a sentence
    """

    hours: float
    goodput: float
    save_every_seconds: float | None
    gpu_hours: float
    money: float | None
    energy_kwh: float
    assumptions: tuple[str, ...]


def predict_run(
    step_seconds: float,
    updates: float,
    state_bytes: float,
    cluster: Cluster,
    price: float | None = None,
    mtbf_hours: float | None = None,
) -> WholeRun:
    """Return what `updates` updates take.

    `price` is for an hour of one GPU; `mtbf_hours` the mean time between failures of the whole job; `state_bytes` the
    parameters and optimizer state of the whole model, which a checkpoint writes.
    """
    nodes = max(1, cluster.gpus // cluster.per_node)
    assumptions = [
        f"watts: {_SHARE_OF_WATTS:g} of the design power, times {_OVERHEAD:g} for the node and its cooling",
    ]
    goodput, every = 1.0, None
    if mtbf_hours is not None:
        failures = mtbf_hours * 3600
        save = state_bytes / (_STORAGE * nodes)
        every = optimal_interval_seconds(save, failures)
        lost = save / (every + save) + (every / 2 + save / 2 + _RESTART) / failures
        goodput = max(0.0, 1 - lost)
        assumptions += [
            f"a failure every {mtbf_hours:g} hours of the job (--mtbf), as --save-every auto has it (Young, Daly)",
            f"a checkpoint of {state_bytes / 1e9:.0f} GB takes {save:.0f} s, at 2 GB/s for each node",
            f"{_RESTART:g} s from a failure to the next update",
        ]
    else:
        assumptions.append("no failures and no checkpoints: give --mtbf HOURS")
    hours = step_seconds * updates / 3600 / goodput if goodput > 0 else float("inf")
    gpu_hours = hours * cluster.gpus
    energy = gpu_hours * cluster.gpu.watts * _SHARE_OF_WATTS * _OVERHEAD / 1000
    if price is not None:
        assumptions.append(f"{price:g} for an hour of one GPU (--price)")
    return WholeRun(
        hours, goodput, every, gpu_hours, gpu_hours * price if price is not None else None, energy, tuple(assumptions)
    )
