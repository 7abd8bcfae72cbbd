"""Single: one process, one device. All other strategies are compared with it.

Memory         parameters, gradients and optimizer state in full
Communication  none
Use when       the model fits and one device is fast enough; also to find mistakes
Exact          yes
Source         the definition: Robbins and Monro 1951
"""

from __future__ import annotations

from everyrank.layout import Layout
from everyrank.parallel.full_state import replicated_state_dict
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.parallelize import parallelize
from everyrank.parallel.trainable import make_trainable
from everyrank.strategies import Prepared
from everyrank.strategies.step import make_predict, make_step
from everyrank.workload import Workload
from everyrank.world import World, single_process_world

__all__ = ["prepare"]


def prepare(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Build the model and train it in this process, whatever the size of the world."""
    world = single_process_world(world)
    mesh = open_mesh(layout, world)
    parallel = parallelize(workload, layout, mesh)
    model = parallel.model
    trainable = make_trainable(workload, layout, model)

    return Prepared(
        parallel,
        trainable,
        make_step(parallel, trainable),
        make_predict(parallel),
        full_state=lambda: replicated_state_dict(model, rank=0),
        replicated_tensors=[],
        num_micro_batches=layout.accumulate,
    )
