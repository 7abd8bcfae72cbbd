"""Custom parallelize function: the user's `parallelize(model, mesh) -> model`, trained like any other strategy.

Memory         the parameters that the user's function leaves on each rank
Communication  the communication of the user's code, and per update one all-reduce of loss and count of terms (two
               elements); with clip_norm, unless the contract has a clip_grad_norm, the sum of squares over the axes
               that split parameters
Use when       you already have parallel code and want to know whether it is equivalent to one device
Exact          depends on the user's code; check it with `everyrank verify`
Source         the shape of torchtitan's `parallelize` functions: Liang et al. 2024

A layout is written `path/file.py[:function][:axis=size,...]`; the default function is `parallelize`. Its
`ParallelContract` (layout/contract.py) describes what the returned model does not show.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from everyrank.data import Batch
from everyrank.errors import EveryrankError
from everyrank.layout import Layout, find_custom_parallelize
from everyrank.parallel.context.parts import sequence_parts
from everyrank.parallel.custom import (
    call_parallelize,
    custom_device_mesh,
    forward_error,
    gatherable_tensors,
    gathered_state,
    quiet_fake_tensor_log,
    require_gatherable,
    sum_squares_of_parts,
    unwrapped,
    whole_state,
)
from everyrank.parallel.fsdp import reshard_after
from everyrank.parallel.full_state import state_tensors
from everyrank.parallel.init_model import init_model
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.micro_batch import MicroBatchState
from everyrank.parallel.parallelize import ParallelModel, broadcast_from_rank_0, call_model, set_up_exact_dropout
from everyrank.parallel.trainable import make_trainable
from everyrank.strategies import Prepared
from everyrank.strategies.step import make_step
from everyrank.workload import Workload, changed
from everyrank.world import World

__all__ = ["prepare"]


def prepare(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Call the user's function on the model, which is identical on every rank, and prepare the result."""
    code = find_custom_parallelize(layout, world.size)
    contract, device_mesh, mesh = code.contract, custom_device_mesh(code, world), open_mesh(layout, world)
    original, _ = init_model(workload, layout, world)
    broadcast_from_rank_0(original, world)
    shapes, kind = {name: tensor.shape for name, tensor in state_tensors(original).items()}, type(original)
    dropout, dropout_contexts = set_up_exact_dropout(changed(workload, tensor_plan=None), layout, mesh, original)
    wrapped = call_parallelize(code, original, device_mesh, world)
    model = unwrapped(wrapped)
    gatherable = gatherable_tensors(model, shapes)
    gathered = list(gathered_state(code, wrapped, device_mesh, shapes))
    ungatherable = [name for name in shapes if name not in gatherable]
    full_tensors = [
        tensor for name, tensor in gatherable.items() if not isinstance(tensor, DTensor) and name not in gathered
    ]
    if workload.clip_norm is not None and contract.clip_grad_norm is None:
        require_gatherable(ungatherable, code)
    parts = sequence_parts(workload, mesh, contract.order_of_positions(), contract.cut_by_context)
    state = MicroBatchState(dropout_contexts, dropout_contexts)
    parallel = ParallelModel(workload, layout, mesh, model, None, state, None, parts, dropout=dropout)
    trainable = make_trainable(workload, layout, model)
    clip = contract.clip_grad_norm
    if clip is not None:
        trainable.clip = lambda max_norm: clip(wrapped, max_norm, device_mesh)

    def call(value: Any) -> Any:
        try:
            with quiet_fake_tensor_log():
                return call_model(wrapped, value, kind)
        except (EveryrankError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise forward_error(error, model, code) from error

    def after_backward() -> None:
        if contract.after_backward is not None:
            contract.after_backward(wrapped, device_mesh)

    def sum_over_ranks(local: Tensor) -> Tensor:
        total = parallel.count_once(local).clone()
        if world.group is not None:
            dist.all_reduce(total, group=world.group)
        return total

    scale = contract.scale_loss
    step = make_step(
        parallel,
        trainable,
        forward=lambda value: (call(value), None),
        around=lambda _, micro_batch: contract.around(wrapped, device_mesh, micro_batch),
        scale_loss=(lambda loss: scale(loss, device_mesh)) if scale is not None else lambda loss: loss,
        has_autocast=False,
        after_backward=after_backward,
        sum_over_ranks=sum_over_ranks,
        num_averaged=code.num_averaged(),
        sum_grad_squares=lambda: sum_squares_of_parts(trainable.parameters),
    )

    def predict(batch: Batch) -> Any:
        with parallel.micro_batch(batch) as micro_batch, contract.around(wrapped, device_mesh, micro_batch):
            output = call(micro_batch.input)
        return parallel.gather_output(reshard_after(model, output))

    return Prepared(
        parallel,
        trainable,
        step,
        predict,
        full_state=lambda: whole_state(code, wrapped, device_mesh, shapes, world.rank),
        replicated_tensors=full_tensors,
        num_micro_batches=layout.accumulate,
        not_compared=sorted(set(ungatherable) - set(gathered), key=ungatherable.index),
        not_saved=[*ungatherable, *gathered],
    )
