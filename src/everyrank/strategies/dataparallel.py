"""DataParallel: one process, several devices; the model is copied to all of them in every step.

Memory         parameters, gradients and optimizer state in full on the first device; copies of the parameters on the
               others
Communication  inside the process, per micro-batch: parameters and inputs to every device, outputs and gradients back
Use when       never in new code: torch recommends ddp, which does not copy the model and has one interpreter per device
Exact          yes; with batch_norm=local no: compared with a simulation of the same in one process. Exact dropout is
               refused, because the copies do not know which samples they have
Source         torch.nn.DataParallel

A model with batch norm needs batch_norm=local: each device normalises its own part of a micro-batch, so the training
depends on the number of devices. The running statistics are those of the first device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from everyrank.data.loader import map_tensors
from everyrank.errors import CannotRunError
from everyrank.layout import Layout
from everyrank.layout.options import BatchNormOptions
from everyrank.parallel.batch_norm import has_batch_norm
from everyrank.parallel.full_state import replicated_state_dict
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.parallelize import call_model, parallelize
from everyrank.parallel.precision import autocast
from everyrank.parallel.trainable import make_trainable
from everyrank.strategies import Prepared
from everyrank.strategies.step import make_predict, make_step
from everyrank.workload import Workload
from everyrank.world import World, single_process_world

__all__ = ["OverDevices", "prepare"]


def prepare(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Copy the model to as many devices as ranks, or to all devices if there is only one rank.

    Raises `CannotRunError` without two CUDA devices, for a model with exact dropout, and for one with batch norm
    without batch_norm=local.
    """
    is_local = layout.read(BatchNormOptions).batch_norm == "local"
    devices = _devices(world, is_local)
    world = single_process_world(world)
    mesh = open_mesh(layout, world)
    parallel = parallelize(workload, layout, mesh)
    model = parallel.model
    if has_batch_norm(model) and not is_local:
        raise CannotRunError(
            "batch norm would use only the samples of each device; add batch_norm=local to allow that, or use ddp, "
            "which computes it over all ranks"
        )
    if parallel.dropout is not None and parallel.dropout.is_used:
        raise CannotRunError(
            "exact dropout is not supported, because a copy of the model does not know which samples it has; use "
            "ddp, or set Workload.dropout='torch'"
        )
    data_parallel = OverDevices(_SingleInput(model, layout, world), device_ids=devices, output_device=devices[0])
    trainable = make_trainable(workload, layout, model)

    return Prepared(
        parallel,
        trainable,
        make_step(parallel, trainable, forward=lambda value: (data_parallel(value), None)),
        make_predict(parallel, data_parallel),
        full_state=lambda: replicated_state_dict(model, rank=0),
        replicated_tensors=[],
        num_micro_batches=layout.accumulate,
    )


def _devices(world: World, is_local: bool) -> list[int]:
    """Return the devices for the copies. Raises `CannotRunError` with fewer than two.

    With `is_local` their number changes the training, so it has to be the number of ranks if there are several.
    """
    num_cuda = torch.cuda.device_count()
    num_devices = min(world.local_size, num_cuda) if world.local_size > 1 else num_cuda
    if world.device.type != "cuda" or num_devices < 2:
        raise CannotRunError("needs 2 CUDA devices")
    if is_local and world.size > 1 and num_devices != world.size:
        raise CannotRunError(
            f"with batch_norm=local the training depends on the number of devices, and there are {num_devices} for "
            f"{world.size} processes; give --processes {num_devices}"
        )
    return list(range(num_devices))


class OverDevices(nn.DataParallel[nn.Module]):
    """`nn.DataParallel` that splits a micro-batch over devices by the rule for ranks: sizes differ by at most one.

    torch splits 10 samples into 4, 4 and 2.
    """

    def scatter(self, inputs: tuple[Any, ...], kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """Return a tuple of inputs for each device, and as many empty keyword arguments."""
        count = len(device_ids)
        lengths: list[int] = []
        map_tensors(inputs, lambda tensor: lengths.append(len(tensor)) or tensor)
        parts = [
            map_tensors(
                inputs,
                lambda tensor, index=index: tensor.tensor_split(count)[index].to(
                    torch.device(self.src_device_obj.type, device_ids[index]), non_blocking=True
                ),
            )
            for index in range(min(count, *lengths))
        ]
        return parts, [kwargs] * len(parts)


class _SingleInput(nn.Module):
    """Takes the input as one argument, so that DataParallel can split tensors, tuples and dicts.

    Each copy runs in its own thread. DataParallel passes on that autocast is enabled, but not its dtype, so the threads
    would use fp16 instead of bf16.
    """

    def __init__(self, model: nn.Module, layout: Layout, world: World) -> None:
        super().__init__()
        self.model, self.layout, self.world = model, layout, world

    def forward(self, value: object) -> object:
        with autocast(self.layout, self.world):
            return call_model(self.model, value)
