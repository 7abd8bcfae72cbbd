"""DistributedDataParallel: every rank holds the whole model, and gradients are averaged while backward runs.

The number of loss terms is reduced with the gradients. Ranks normalise by the global count, but a blocking all-reduce
of the count would delay every step. So it is sent in DDP's own bucket, as the gradient of a parameter of two zeros: the
gradient of (zeros * [sum, count]).sum() is [sum, count].
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from everyrank.errors import UnsupportedLayoutError, WorkloadError
from everyrank.layout import Layout
from everyrank.layout.options import DDPOptions
from everyrank.parallel.parallelize import call_model
from everyrank.parallel.precision import param_dtype
from everyrank.world import World, do_all_ranks_agree

__all__ = ["ModelWithCount", "apply_ddp", "check_reduced", "check_unused_parameters", "global_sum_and_count"]


# the name since torch 2.13, which warns of the old one
_HAS_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {"forward_sync_buffers" if _HAS_NEW_NAME else "broadcast_buffers": False}
_CHECKS_FAILED = itertools.count()  # each failed check has a key of its own


class ModelWithCount(nn.Module):
    """A model with a parameter of two elements whose gradient carries (sum, count) to all ranks."""

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.carrier = nn.Parameter(torch.zeros(2, device=device, dtype=dtype))

    def forward(self, value: Any) -> tuple[Any, Tensor]:
        """Return the model's output and the carrier, which DDP needs among the outputs to find it used."""
        return call_model(self.model, value), self.carrier * 1.0


def apply_ddp(
    model: nn.Module, layout: Layout, world: World, left_out: Collection[nn.Parameter] = ()
) -> DistributedDataParallel:
    """Wrap the model in DDP; a call returns (output, carrier of shape (2,)).

    The gradients of parameters in `left_out` are not reduced.
    """
    options = layout.read(DDPOptions)
    module = ModelWithCount(model, world.device, param_dtype(layout))
    others = {id(parameter) for parameter in left_out}
    names = [name for name, parameter in module.named_parameters() if id(parameter) in others]
    # torch's own way, for want of an argument
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)  # pyright: ignore
    return DistributedDataParallel(
        module,
        process_group=world.group,
        # synchronised batch norm leaves the same bits in every rank's buffers: nothing to send before each forward
        **_NO_BUFFER_SYNC,
        bucket_cap_mb=options.bucket_mb,  # pyright: ignore[reportArgumentType]  (None: torch's own)
        find_unused_parameters=options.find_unused,
        static_graph=options.static_graph,
        gradient_as_bucket_view=True,  # else there are two copies of all gradients: theirs, and the buckets'
    )


def global_sum_and_count(ddp: DistributedDataParallel, world: World) -> Tensor:
    """Return [sum, count] over all ranks, shape (2,), after backward. DDP averages, so the mean is scaled back."""
    module: ModelWithCount = ddp.module
    assert module.carrier.grad is not None
    return module.carrier.grad * world.size


def check_unused_parameters(parameters: Mapping[str, nn.Parameter], layout: Layout, world: World) -> None:
    """Raise for parameters without a gradient, which DDP would silently not reduce.

    Raises `UnsupportedLayoutError` if all ranks miss the same number of gradients, else `WorkloadError`.
    """
    unused = next((name for name, p in parameters.items() if p.grad is None and p.requires_grad), None)
    if unused is None:
        return
    options = layout.read(DDPOptions)
    if options.find_unused or options.static_graph:
        return
    message = (
        f"layout {layout}: parameter {unused} took no part in the loss; "
        f"use --layout {layout.strategy}:find_unused=true, or freeze it"
    )
    # another layout may train such a model, so a list of layouts goes on, if no rank waits for another's gradients
    is_everywhere = do_all_ranks_agree(world, f"unused parameters/{next(_CHECKS_FAILED)}")
    raise (UnsupportedLayoutError if is_everywhere else WorkloadError)(message)


def check_reduced(ddp: DistributedDataParallel, layout: Layout) -> None:
    """Raise `WorkloadError` after a backward in which a parameter took no part that had a gradient before.

    DDP then leaves the gradients of its bucket as they are on each rank, and fails only in the next update.
    """
    check: Callable[[], None] = getattr(ddp, "_check_reducer_finalized", lambda: None)  # private; `plan` has no reducer
    try:
        check()
    except RuntimeError as error:
        raise WorkloadError(
            f"layout {layout}: some parameters took part in the loss of an earlier micro-batch, but not in the last, "
            f"which averages the gradients; use --layout {layout.strategy}:find_unused=true"
        ) from error
