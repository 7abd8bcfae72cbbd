"""What ddp, zero1 and fsdp are compared with where they change the mathematics: their replicas, one after the other.

The model is there once. Each rank's gradient is computed from the samples that this rank would read, with batch norm
over these alone; then the gradients are put together as they would arrive (parallel/compress.py), for one update.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from everyrank.errors import CannotRunError
from everyrank.layout import Layout
from everyrank.layout.options import BatchNormOptions
from everyrank.parallel.batch_norm import has_batch_norm
from everyrank.parallel.compress import make_combine
from everyrank.parallel.init_model import on_cpu
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.parallelize import parallelize
from everyrank.parallel.trainable import make_trainable
from everyrank.simulations.ranks import in_one_process, simulate_update
from everyrank.strategies import Prepared
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["simulate"]

MakeCombine = Callable[[nn.Module, Layout], tuple[Callable[[nn.Parameter, list[Tensor]], Tensor], Any]]
_OPTIONS = ("batch_norm", "compress", "matrix_rank")  # that change the mathematics; no others are read here


def simulate(workload: Workload, layout: Layout, world: World, make: MakeCombine = make_combine) -> Prepared:
    """The replicas of `layout.simulated` ranks in one process. `make` gives how their gradients are put together."""
    if layout.read(BatchNormOptions).batch_norm == "sync" and has_batch_norm(on_cpu(workload)):
        raise CannotRunError(
            "batch norm spans all ranks, and then one process cannot tell the gradient of one of them from those of "
            "the others; add batch_norm=local to compare"
        )
    options = {key: layout.options[key] for key in _OPTIONS if key in layout.options}
    layout = dataclasses.replace(layout, strategy="ddp", options=options)
    parallel = parallelize(workload, layout, open_mesh(layout, world))
    trainable = make_trainable(workload, layout, parallel.model)
    combine, forget = make(parallel.model, layout)
    trainable.on_restore.append(forget)

    return in_one_process(parallel, trainable, functools.partial(simulate_update, parallel, trainable, combine))
