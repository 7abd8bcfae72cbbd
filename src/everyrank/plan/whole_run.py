"""Predicts a whole run: hours, cost and energy, with the time of checkpoints and failures."""

from __future__ import annotations

from dataclasses import dataclass

from everyrank.errors import UsageError
from everyrank.plan.hardware import Cluster
from everyrank.runs import optimal_interval_seconds

__all__ = ["WholeRun", "predict_run"]

_STORAGE = 2e9  # bytes a second from a node to shared storage
_RESTART = 600.0  # seconds from a failure to the first update after it
_SHARE_OF_WATTS = 0.85  # fraction of the thermal design power that a training draws
_OVERHEAD = 1.5  # power of a node with cooling, as a multiple of its GPUs


@dataclass(frozen=True)
class WholeRun:
    """The time, cost and energy of a run.

    hours        hours with checkpoints and failures; goodput: the fraction that trains
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
    """Return the time, cost and energy of `updates` updates.

    `price` is for an hour of one GPU; `mtbf_hours` the mean time between failures of the whole job; `state_bytes` the
    parameters and optimizer state of the whole model, which a checkpoint writes. Raises `UsageError` if failures are so
    frequent that the run never ends.
    """
    nodes = max(1, cluster.gpus // cluster.per_node)
    assumptions = [
        f"watts: {_SHARE_OF_WATTS:g} of the design power, times {_OVERHEAD:g} for the node and its cooling",
    ]
    goodput, save_interval = 1.0, None
    if mtbf_hours is not None:
        mtbf_seconds = mtbf_hours * 3600
        save_seconds = state_bytes / (_STORAGE * nodes)
        save_interval = optimal_interval_seconds(save_seconds, mtbf_seconds)
        lost_fraction = (
            save_seconds / (save_interval + save_seconds)
            + (save_interval / 2 + save_seconds / 2 + _RESTART) / mtbf_seconds
        )
        goodput = 1 - lost_fraction
        if goodput <= 0:
            raise UsageError(
                f"--mtbf {mtbf_hours:g}: a checkpoint takes {save_seconds:.0f} s and a restart {_RESTART:g} s, so a "
                "job that fails so often makes no progress; give more hours"
            )
        assumptions += [
            f"a failure every {mtbf_hours:g} hours of the job (--mtbf), checkpoints as by --save-every auto",
            f"a checkpoint of {state_bytes / 1e9:.0f} GB takes {save_seconds:.0f} s, at 2 GB/s for each node",
            f"{_RESTART:g} s from a failure to the next update",
        ]
    else:
        assumptions.append("no failures and no checkpoints: give --mtbf HOURS")
    hours = step_seconds * updates / 3600 / goodput
    gpu_hours = hours * cluster.gpus
    energy = gpu_hours * cluster.gpu.watts * _SHARE_OF_WATTS * _OVERHEAD / 1000
    if price is not None:
        assumptions.append(f"{price:g} for an hour of one GPU (--price)")
    return WholeRun(
        hours,
        goodput,
        save_interval,
        gpu_hours,
        gpu_hours * price if price is not None else None,
        energy,
        tuple(assumptions),
    )
