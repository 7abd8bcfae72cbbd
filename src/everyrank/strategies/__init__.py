"""The ways of training, one a file. Each has one function: `prepare(workload, layout, world) -> Prepared`.

A strategy composes the mechanisms in `parallel/` in the one right order; its header says what every rank holds, what
travels, when to use it, and whether it is exact. Which strategies there are is the table in `layout.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from everyrank.data import Batch, Slice
from everyrank.layout import STRATEGIES, Layout
from everyrank.parallel.average import Average
from everyrank.parallel.mesh import Mesh
from everyrank.strategies._update import LossScale, evaluate_batch
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["Prepared", "evaluate_batch", "prepare"]


@dataclass(frozen=True)
class Prepared:
    """What the loop needs from any way of training.

    mesh        where this rank stands on the axes of the layout, and in which world the layout runs
    step        one update from its micro-batches; float64, shape (2,): this rank's share of (sum, count). The loop
                adds the shares over ranks, outside the timed region
    predict     the model's output for the rank's part of a batch, without an update; called equally often on every
                rank
    state       full parameters and persistent buffers on rank 0's CPU, {} elsewhere; a collective
    replicas    the tensors that every rank holds whole, which must be equal to the last bit
    micro_batches   parts that each update is cut into before it is cut over ranks
    average     of the weights, where the workload has an ema_decay; what evaluation takes
    idle        of a pipeline: the part of a step that ranks stand idle in theory, the seconds that the newest step
                spent on micro-batches, and how many of them this rank waited for others
    model, optimizer, schedule, scale    what checkpointing and resetting handle
    """

    mesh: Mesh
    step: Callable[[Sequence[Batch]], Tensor]
    predict: Callable[[Batch], Any]
    state: Callable[[], dict[str, Tensor]]
    replicas: Sequence[Tensor]
    micro_batches: int
    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler | None
    scale: LossScale | None
    idle: Callable[[], tuple[float, float, float]] | None = None
    average: Average | None = None

    @property
    def reads(self) -> Slice:
        """The part of each micro-batch that this rank reads."""
        return self.mesh.reads

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """While the model has the weights that are evaluated: the averages, where there are any."""
        return self.average.in_place() if self.average is not None else contextlib.nullcontext()

    @property
    def listens(self) -> bool:
        """Whether the schedule follows evaluations, at the end of each epoch, instead of counting updates."""
        return isinstance(self.schedule, ReduceLROnPlateau)

    def hear(self, eval_loss: float | None) -> None:
        """The loss of such an evaluation: exact, and so the same number on every rank and under every layout."""
        if isinstance(self.schedule, ReduceLROnPlateau) and eval_loss is not None:
            self.schedule.step(eval_loss)

    @property
    def speaks(self) -> bool:
        """Whether the outputs of this rank count: of ranks with the same samples, one that has all of the output."""
        return self.mesh.place["pipeline"] == self.mesh.size("pipeline") - 1 and self.mesh.is_first("context", "tensor")


def prepare(workload: Workload, layout: Layout, world: World) -> Prepared:
    """`workload` made ready to train under `layout` on this rank. Raises what the strategy's own `prepare` raises."""
    layout.mesh(world.size)  # refuses degrees that do not fit
    module = importlib.import_module(STRATEGIES[layout.strategy].module)
    prepared: Prepared = module.prepare(workload, layout, world)
    if workload.ema_decay is not None:
        prepared = dataclasses.replace(prepared, average=Average(workload.ema_decay, prepared.model))
    return prepared
