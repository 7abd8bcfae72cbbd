"""Tensor parallel: every rank holds a part of each matrix, and all ranks compute on the same samples.

             rank 0                     rank 1
    x ──► up[:half] ──► gelu       up[half:] ──► gelu ◄── x        colwise: a part of the features, no communication
               │                        │
          down[:, :half]           down[:, half:]                  rowwise: a partial sum
               └────── all-reduce ──────┘ ──► y                    the same on every rank

Memory         a part of each matrix that `Workload.tensor_plan` splits, its gradient and its optimizer state; all other
               layers in full
Communication  per micro-batch, not overlapped:
                 rowwise, vocabulary   an all-reduce of the output in forward
                 gather                an all-reduce of the input's gradient in backward; the same for a colwise,
                                       colwise_gather or colwise_loss layer outside of a gather module
                 colwise_gather        an all-gather of the output, too
                 colwise_loss          three all-reduces of one number for each position, too
               Per update: an all-reduce of the gradient of each parameter in a `replicate_sum` module; with clip_norm,
               an all-reduce of the sum of squared gradients. Before the first update, all parameters are gathered once
               to compare the split model with the whole model on one sample. In the first update, one number for each
               unsplit parameter is all-gathered, to check that all ranks have the same gradient
Use when       a layer is too large for one device, or the batch cannot grow, within a host with fast connections
Exact          yes
Source         Shoeybi et al. 2019; Korthikanti et al. 2022 (sequence)

Keys: sequence=true also splits the activations between the split layers, along the sequence. Each all-reduce becomes a
reduce-scatter after a split layer and an all-gather before the next one; in backward the two are exchanged. Each update
(under fsdp: each micro-batch) also all-reduces the gradients of the norms marked `sequence` in the plan. meta=true
fills the parts from a file, for a model that does not fit in the memory of any rank. `Workload.tensor_plan` maps module
names to the styles listed in parallel/tensor/plan.py.
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

    # Every rank computes the loss of all samples, so [sum, count] needs no all-reduce (sum_over_ranks).
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
