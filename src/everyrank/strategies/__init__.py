"""The training strategies, one per file: each composes mechanisms of parallel/, and its header is a tutorial.

Each file has one function: `prepare(workload, layout, world) -> Prepared`. step.py has the training step of all of
them. simulated/ has single-process simulations of the algorithms that are not equivalent to one device.

A header describes what every rank holds, the communication, when to use the strategy, and whether it is equivalent to
one device. The table in `layout/table.py` lists the strategies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everyrank.data import Batch, Slice
from everyrank.errors import CannotRunError
from everyrank.layout import Layout
from everyrank.layout.options import ContextOptions
from everyrank.parallel.local_sgd import Averaging
from everyrank.parallel.mesh import Mesh
from everyrank.parallel.oom import oom_context
from everyrank.parallel.parallelize import ParallelModel
from everyrank.parallel.pipeline.run import PipelineIdle
from everyrank.parallel.precision import param_dtype
from everyrank.parallel.state_memory import check_state_fits
from everyrank.parallel.trainable import Trainable
from everyrank.workload import Workload
from everyrank.world import World, group_of_one, single_process_world

__all__ = ["Prepared", "prepare"]


@dataclass(frozen=True)
class Prepared:
    """A training prepared on this rank: what the training loop needs from a strategy.

    parallel            the model as laid out on this rank, with workload, layout and mesh
    trainable           the model with its optimizer: the state that checkpoints save and snapshots copy
    step                makes one update from its micro-batches (for simulated ranks: all of the first, then all of the
                        second, ...). Returns the local (sum, count) of the loss: float64, shape (2,). The loop sums
                        it over ranks, outside the timed region
    predict             returns the output of the model for this rank's part of a batch, without an update; a collective
                        if the layout splits the model
    full_state          full parameters and persistent buffers on rank 0's CPU, {} elsewhere; a collective
    replicated_tensors  tensors that every rank holds in full, and that must be equal to the last bit
    num_micro_batches   number of micro-batches of an update, each of which is split over ranks
    idle                for a pipeline: the time of the last step, and the time that this rank waited in it
    averaging           for replicas that differ between averages: the schedule of the averages
    gather_for_eval     makes values that only some ranks hold available on all, before evaluation and checkpoints;
                        a collective, which most strategies do not need
    not_compared        tensors that `full_state` leaves out, because their placement on the ranks is unknown
    not_saved           tensors that no checkpoint can hold, for the same reason
    """

    parallel: ParallelModel
    trainable: Trainable
    step: Callable[[Sequence[Batch]], Tensor]
    predict: Callable[[Batch], Any]
    full_state: Callable[[], dict[str, Tensor]]
    replicated_tensors: Sequence[Tensor]
    num_micro_batches: int
    idle: Callable[[], PipelineIdle] | None = None
    averaging: Averaging | None = None
    gather_for_eval: Callable[[], None] = lambda: None
    not_compared: Sequence[str] = ()
    not_saved: Sequence[str] = ()

    @property
    def workload(self) -> Workload:
        """The workload."""
        return self.parallel.workload

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.parallel.layout

    @property
    def mesh(self) -> Mesh:
        """The mesh of this rank."""
        return self.parallel.mesh

    @property
    def world(self) -> World:
        """The ranks of the layout; a world of one for a layout of one process."""
        return self.parallel.mesh.world

    @property
    def model(self) -> nn.Module:
        """The user's model, as it is laid out on this rank."""
        return self.trainable.model

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and inputs."""
        return param_dtype(self.layout)

    @property
    def data_slice(self) -> Slice:
        """The slice of each micro-batch that this rank reads."""
        return self.mesh.data_slice

    @property
    def data_slices(self) -> list[Slice]:
        """The slices of each micro-batch for one step: this rank's, or those of all simulated ranks."""
        simulated = self.layout.simulated
        return [Slice(rank, simulated) for rank in range(simulated)] or [self.data_slice]

    @property
    def has_output(self) -> bool:
        """Whether the outputs of this rank count: the first with the whole output, of ranks with the same samples."""
        is_last_stage = self.mesh.coordinate["pipeline"] == self.mesh.size("pipeline") - 1
        return is_last_stage and self.mesh.is_first("context", "tensor")

    @property
    def are_replicas_equal(self) -> bool:
        """Whether replicas are identical now; a checkpoint can be saved only then."""
        return self.averaging is None or self.averaging.are_equal

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Swap the weights for evaluation into the model for the block: averages if there are any."""
        if self.averaging is not None:
            return self.averaging.averaged_weights()
        ema = self.trainable.ema
        return ema.averaged_weights() if ema is not None else contextlib.nullcontext()


_MISSING_IN_GLOO_CUDA = {
    "pipeline": "send and receive",
    "shard": "all-gather and reduce-scatter of several tensors at once",
    "tensor": "all-gather of several tensors at once",
    "expert": "all-gather of several tensors at once",
    "context": "send and receive",
}
"""Axis -> the collectives of its ranks that gloo supports only for CPU tensors.

Source: torch/csrc/distributed/c10d/ProcessGroupGloo.cpp
"""


def _check_backend_support(layout: Layout, world: World) -> None:
    """Raise `CannotRunError` for a layout that needs a collective gloo lacks for CUDA tensors."""
    if world.device.type != "cuda" or world.backend != "gloo" or world.size == 1 or layout.simulated:
        return
    degrees = layout.mesh(world.size) if layout.axis is not None else {}
    axes = [axis for axis, degree in degrees.items() if degree > 1 and axis in _MISSING_IN_GLOO_CUDA]
    if "context" in axes and layout.read(ContextOptions).method == "ulysses":
        axes.remove("context")
    missing = _MISSING_IN_GLOO_CUDA[axes[0]] if axes else "send and receive" if layout.servers else ""
    if missing:
        raise CannotRunError(
            f"gloo has no {missing} for CUDA tensors; use one process for each device, --device cpu, ddp or zero1, or "
            "--backend nccl, which is slow for ranks that share a device"
        )


def prepare(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Prepare `workload` for training under `layout` on this rank. Raises what the strategy's `prepare` raises.

    If memory is insufficient, this raises `CannotRunError`, and later steps raise `OutOfMemoryError`.
    """
    degrees = layout.mesh(world.size)  # raises for degrees that do not fit
    _check_backend_support(layout, world)
    with oom_context("build", workload, layout, world):
        if layout.simulated:
            simulation = importlib.import_module(f"everyrank.strategies.simulated.{layout.row.simulation}")
            with group_of_one(single_process_world(world)):
                prepared = simulation.simulate(workload, layout, single_process_world(world))
        else:
            with group_of_one(single_process_world(world)) if layout.axis is None else contextlib.nullcontext():
                other_modules = [name for axis, name in layout.row.instead.items() if degrees.get(axis, 1) > 1]
                module = importlib.import_module(other_modules[0] if other_modules else layout.row.module)
                prepared = module.prepare(workload, layout, world)
    if workload.num_devices == 1 and not layout.simulated:
        check_state_fits(prepared.trainable, layout, prepared.world)

    def step(batches: Sequence[Batch]) -> Tensor:
        with oom_context("update", workload, layout, world), group_of_one(prepared.world):
            return prepared.step(batches)

    def predict(batch: Batch) -> Any:
        with oom_context("predict", workload, layout, world), group_of_one(prepared.world):
            return prepared.predict(batch)

    return dataclasses.replace(prepared, step=step, predict=predict)
