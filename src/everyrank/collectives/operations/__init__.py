"""Every point-to-point and collective operation of torch.distributed, with the expected result of each rank.

An operation is prepared once for a size and can then be called repeatedly; `wrong` counts elements that differ from the
expected result. Inputs are small integers, so that sums and products are exact in every dtype; an average is compared
after rounding to the dtype.
"""

from __future__ import annotations

from everyrank.collectives.operations.case import Call, Case, Operation
from everyrank.collectives.operations.collective import (
    make_all_gather,
    make_all_gather_into_tensor,
    make_all_reduce,
    make_all_to_all,
    make_all_to_all_uneven,
    make_barrier,
    make_broadcast,
    make_gather,
    make_monitored_barrier,
    make_reduce,
    make_reduce_scatter,
    make_scatter,
)
from everyrank.collectives.operations.objects import (
    make_all_gather_object,
    make_broadcast_object_list,
    make_gather_object,
    make_scatter_object_list,
    make_send_object_list,
)
from everyrank.collectives.operations.point_to_point import make_batch_exchange, make_exchange, make_send

__all__ = ["OPERATIONS", "Call", "Case", "Operation"]


def _fraction_of_others(ranks: int) -> float:
    return (ranks - 1) / ranks


def _num_ranks(ranks: int) -> int:
    return ranks


def _one_to_each(ranks: int) -> int:
    return ranks * (ranks + 1) // 2


OPERATIONS = {
    "send": Operation(make_send, has_async=False, least_ranks=2),
    "isend": Operation(make_exchange, has_async=False, least_ranks=2),
    "batch_isend_irecv": Operation(make_batch_exchange, has_async=False, least_ranks=2),
    "broadcast": Operation(make_broadcast),
    "reduce": Operation(make_reduce),
    "all_reduce": Operation(make_all_reduce, lambda ranks: 2 * _fraction_of_others(ranks)),
    "gather": Operation(make_gather, _fraction_of_others, multiple=_num_ranks),
    "scatter": Operation(make_scatter, _fraction_of_others, multiple=_num_ranks),
    "all_gather": Operation(make_all_gather, _fraction_of_others, multiple=_num_ranks),
    "all_gather_into_tensor": Operation(make_all_gather_into_tensor, _fraction_of_others, multiple=_num_ranks),
    "reduce_scatter": Operation(make_reduce_scatter, _fraction_of_others, multiple=_num_ranks),
    "all_to_all": Operation(make_all_to_all, _fraction_of_others, multiple=_num_ranks),
    "all_to_all_uneven": Operation(make_all_to_all_uneven, _fraction_of_others, multiple=_one_to_each),
    "barrier": Operation(make_barrier, has_size=False, has_tensors=False),
    "monitored_barrier": Operation(make_monitored_barrier, has_async=False, has_size=False, has_tensors=False),
    "broadcast_object_list": Operation(make_broadcast_object_list, has_async=False, has_tensors=False),
    "all_gather_object": Operation(make_all_gather_object, has_async=False, has_tensors=False),
    "gather_object": Operation(make_gather_object, has_async=False, has_tensors=False),
    "scatter_object_list": Operation(make_scatter_object_list, has_async=False, has_tensors=False),
    "send_object_list": Operation(make_send_object_list, has_async=False, least_ranks=2, has_tensors=False),
}
"""By the names of `everyrank comm --op`."""
