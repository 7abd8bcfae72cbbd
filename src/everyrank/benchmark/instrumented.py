"""Profiles a few updates of one layout: peak memory, communication volume, and exposed communication.

It prepares the layout separately from the timed runs, because counting and profiling slow down a step.
"""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass, field
from typing import Any

from everyrank.benchmark.comm_counter import CommCounter
from everyrank.data import all_updates, epoch_of, planned_updates
from everyrank.layout import Layout
from everyrank.loop import run_updates, wrap_user_errors
from everyrank.measure.memory import peak_memory
from everyrank.measure.split import PHASES, exposed_fractions
from everyrank.parallel.pipeline.run import PipelineIdle
from everyrank.record import Collective
from everyrank.strategies import prepare
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["Instrumented", "run_instrumented"]

_WARM_UP_UPDATES = (
    3  # DistributedDataParallel rebuilds its buckets in the second update, optimizers make their state in the first
)
_PROFILED_UPDATES = 10
_IDLE_UPDATES = 10
_NO_IDLE = PipelineIdle(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Instrumented:
    """The measurements of one rank. `exposed_fractions` is NaN if the workload is too short to measure them.

    idle                for a pipeline, the sum of `Prepared.idle` over a few updates without instruments
    peak_memory_bytes   peak bytes of tensors, from building the model to the end of the third update
    collectives         of one update; for local SGD, of all updates between two averages
    exposed_fractions   fraction of each phase that was exposed communication, in the order of `measure.split.PHASES`
    """

    peak_memory_bytes: int
    idle: PipelineIdle = _NO_IDLE
    collectives: list[Collective] = field(default_factory=list[Collective])
    exposed_fractions: list[float] = field(default_factory=lambda: [math.nan] * len(PHASES))


def run_instrumented(workload: Workload, dataset: Any, layout: Layout, world: World) -> Instrumented:
    """Run a few updates of `layout` under the instruments. A collective."""
    planned = planned_updates(workload, dataset)  # a learning-rate schedule may end there
    updates = all_updates(planned, epoch_of(workload, dataset).updates)
    with peak_memory(world.device) as memory:
        with wrap_user_errors():
            prepared = prepare(workload, layout, world)
        # verify has already checked the model; a second check would gather the whole model and count as memory
        prepared.parallel.is_first_call_done = True
        shares = run_updates(prepared, dataset, updates)
        for _ in range(min(_WARM_UP_UPDATES, planned)):
            next(shares)
    num_left = planned - _WARM_UP_UPDATES - 1
    if num_left < 1:
        return Instrumented(memory.bytes)
    idle = _NO_IDLE
    if prepared.idle is not None:
        for _ in range(min(_IDLE_UPDATES, num_left - 1)):
            next(shares)
            step_idle = prepared.idle()
            seconds, waiting = idle.seconds + step_idle.seconds, idle.waiting_seconds + step_idle.waiting_seconds
            idle = PipelineIdle(step_idle.theory_share, seconds, waiting)
            num_left -= 1
    num_counted = min(prepared.averaging.every if prepared.averaging is not None else 1, num_left)
    with CommCounter(prepared.mesh.group_axes()) as traffic:
        for _ in range(num_counted):
            next(shares)
    num_left -= num_counted - 1
    exposed = exposed_fractions(prepared.trainable, shares, min(_PROFILED_UPDATES, num_left), world.device)
    del prepared, shares
    gc.collect()
    return Instrumented(memory.bytes, idle, traffic.collectives(num_counted), [exposed[phase] for phase in PHASES])
