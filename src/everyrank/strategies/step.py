"""One training step: forward and backward over micro-batches, the global sum and count, the optimizer's step.

Every strategy except pipeline and parameter_server builds its step here. It passes only its differences: how the model
is called, the context around a micro-batch, and how the sum and count are reduced over the ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from everyrank.data import Batch
from everyrank.errors import UnsupportedLayoutError
from everyrank.parallel.loss import compute_loss
from everyrank.parallel.parallelize import ParallelModel, call_model
from everyrank.parallel.precision import autocast
from everyrank.parallel.trainable import Trainable

__all__ = ["forward_backward", "make_predict", "make_step"]

_Context = contextlib.AbstractContextManager[Any]


def forward_backward(
    parallel: ParallelModel,
    trainable: Trainable,
    batches: Sequence[Batch],
    *,
    forward: Callable[[Any], tuple[Any, Tensor | None]] | None = None,
    around: Callable[[bool, Batch], _Context] = lambda *_: contextlib.nullcontext(),
    before_last_backward: Callable[[Tensor], None] | None = None,
    scale_loss: Callable[[Tensor], Tensor] = lambda loss: loss,
    deferred_errors: list[UnsupportedLayoutError] | None = None,
    has_autocast: bool = True,
) -> Tensor:
    """Run forward and backward of the local micro-batches. Returns the local [sum, count]: float64, shape (2,).

    forward               input -> (output, carrier); None: the model itself. The gradient of the carrier, shape (2,),
                          is [sum, count] of the micro-batch: a wrapper that reduces gradients reduces it, too
    around                (is_last, micro-batch) -> context around forward and backward
    before_last_backward  called with [sum, count] of all micro-batches, to send it during the last backward
    scale_loss            applied to the sum that backward starts from
    deferred_errors       see `compute_loss`
    has_autocast          False if the wrapper casts itself
    """
    workload, layout, mesh = parallel.workload, parallel.layout, parallel.mesh
    shares: list[Tensor] = []
    for is_last, batch in trainable.iter_micro_batches(batches):
        with parallel.micro_batch(batch) as micro_batch, around(is_last, micro_batch):
            with autocast(layout, mesh.world) if has_autocast else contextlib.nullcontext():
                output, carrier = (
                    forward(micro_batch.input) if forward else (call_model(parallel.model, micro_batch.input), None)
                )
                loss, share = compute_loss(workload, output, micro_batch, mesh, deferred_errors)
            shares.append(share)
            if is_last and before_last_backward is not None:
                before_last_backward(sum(shares[1:], shares[0]))
            outputs_with_gradients = [(carrier, share.to(carrier.dtype))] if carrier is not None else []
            trainable.backward(scale_loss(loss), *outputs_with_gradients)
    return sum(shares[1:], shares[0])


def make_step(
    parallel: ParallelModel,
    trainable: Trainable,
    *,
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda local: local,
    num_averaged: int = 1,
    sum_grad_squares: Callable[[], Tensor] | None = None,
    before_first: Callable[[Batch], None] = lambda _: None,
    after_backward: Callable[[], None] = lambda: None,
    after_step: Callable[[], None] = lambda: None,
    carrier: nn.Parameter | None = None,
    **how: Any,
) -> Callable[[Sequence[Batch]], Tensor]:
    """Return the function `step(micro_batches)`, which makes one update and returns the local [sum, count].

    sum_over_ranks    [sum, count] of this rank -> of all ranks, when backward is done
    num_averaged      ranks over which the gradients were averaged; 1: they are sums, or local
    sum_grad_squares  returns the sum of squares of all gradients, if ranks hold different parts of them
    before_first      called once with the first micro-batch, before the first update
    after_backward    called after the last backward, to reduce gradients that the wrapper does not reduce
    after_step        called after the step of the optimizer
    carrier           an extra parameter whose gradient is [sum, count]
    how               arguments of `forward_backward`
    """
    carriers = [carrier] if carrier is not None else []

    def step(batches: Sequence[Batch]) -> Tensor:
        parallel.call_once(lambda: before_first(batches[0]))
        trainable.zero_grad(*carriers)
        local = forward_backward(parallel, trainable, batches, **how)
        after_backward()
        parallel.reduce_partial_grads()
        trainable.optimizer_step(sum_over_ranks(local), num_averaged, sum_grad_squares)
        after_step()
        parallel.end_update()
        return parallel.count_once(local)

    return step


def make_predict(
    parallel: ParallelModel, forward: Callable[[Any], Any] | None = None, *, has_autocast: bool = True
) -> Callable[[Batch], Any]:
    """Return the function `predict(batch)`: the whole output for this rank's samples, without an update."""

    def predict(batch: Batch) -> Any:
        with (
            parallel.micro_batch(batch) as micro_batch,
            autocast(parallel.layout, parallel.mesh.world) if has_autocast else contextlib.nullcontext(),
        ):
            output = forward(micro_batch.input) if forward else call_model(parallel.model, micro_batch.input)
        return parallel.gather_output(output)

    return predict
