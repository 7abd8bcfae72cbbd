"""Tensor parallel: every rank holds a part of each matrix, and all ranks compute on the same samples.

             rank 0                     rank 1
    x ──► up[:half] ──► gelu       up[half:] ──► gelu ◄── x        colwise: a part of the features, no communication
               │                        │
          down[:, :half]           down[:, half:]                  rowwise: a partial sum
               └────── all-reduce ──────┘ ──► y                    the same on every rank

Memory         a part of each matrix in the plan, its gradient and its optimizer state; all other layers in full
Communication  per micro-batch: forward an all-reduce of the output of each rowwise and vocabulary layer, backward one
               of the gradient of the input of each gather module and of each colwise, colwise_gather or colwise_loss
               layer outside of those; for colwise_gather an all-gather of the output, for colwise_loss three
               all-reduces of one number for each position; all before the next layer can go on. Per update: an
               all-reduce of the gradient of each parameter of replicate_sum; with clip_norm, one of the sum of squares.
               In the first update an all-gather of one number for each parameter that is not split; before it the whole
               model is put together once, and compared
Use when       a layer is too large for one device, or the batch cannot grow, within a host with fast connections
Exact          yes
Source         Shoeybi et al. 2019; Korthikanti et al. 2022 (sequence)

Keys: sequence=true splits the activations between the matrices along the sequence: instead of their all-reduces, a
reduce-scatter behind each split layer and an all-gather before the next, and the other way round in backward; per
update (under fsdp per micro-batch) an all-reduce of the gradient of each norm that the plan calls sequence. meta=true
fills the parts from a file, for a model that fits in the memory of no rank.
`Workload.tensor_plan` describes how layers are split, with the words of parallel/tensor/plan.py.
"""

from __future__ import annotations

import functools

from everyrank.layout import Layout
from everyrank.parallel.check_equal import check_equal
from everyrank.parallel.full_state import full_state_dict
from everyrank.parallel.gradients import norm_params, sum_squares
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.parallelize import parallelize
from everyrank.parallel.tensor.apply import is_split
from everyrank.parallel.trainable import make_trainable
from everyrank.strategies import Prepared
from everyrank.strategies.step import make_predict, make_step
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["prepare"]


def prepare(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Split the weight matrices of the model over the tensor axis."""
    mesh = open_mesh(layout, world)
    parallel = parallelize(workload, layout, mesh)
    parallel.materialise()
    model = parallel.model
    # Splitting replaced parameters, so the optimizer is built after it.
    trainable = make_trainable(workload, layout, model)
    sum_grad_squares = functools.partial(sum_squares, norm_params(trainable.parameters, mesh), mesh)

    # Every rank has computed the loss of all samples, so the count is not sent.
    step = make_step(
        parallel,
        trainable,
        sum_grad_squares=sum_grad_squares,
        before_first=lambda batch: check_equal(parallel, batch),
    )
    return Prepared(
        parallel,
        trainable,
        step,
        make_predict(parallel),
        full_state=lambda: full_state_dict(parallel),
        replicated_tensors=[tensor for tensor in [*trainable.parameters, *model.buffers()] if not is_split(tensor)],
        num_micro_batches=layout.accumulate,
    )
