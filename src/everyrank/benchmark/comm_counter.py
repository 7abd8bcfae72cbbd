"""CommCounter: counts the collectives of one rank, by operation and group, with their bytes.

It counts where torch passes a collective to its backend (the operators of c10d, or one of our backends), so it includes
the collectives that DistributedDataParallel and `fully_shard` start. Bytes are the input of one rank: the whole
tensor of an all-reduce, a broadcast or a send; the local part of an all-gather; the whole input of a reduce-scatter.
How many of them cross the network depends on the algorithm of the backend.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from everyrank.backends import is_observed, observed_calls
from everyrank.record import Collective

__all__ = ["CommCounter"]

# operator -> (operation, index of the argument with the input of this rank)
_OPERATORS: Mapping[str, tuple[str, int]] = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::allgather_": ("all_gather", 1),
    "c10d::_allgather_base_": ("all_gather", 1),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::reduce_": ("reduce", 0),
    "c10d::gather_": ("gather", 1),
    "c10d::gather_into_tensor_": ("gather", 1),
    "c10d::scatter_": ("scatter", 1),
    "c10d::alltoall_": ("all_to_all", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("recv", 0),
    "c10d::recv_any_source_": ("recv", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
}
_NO_TRAFFIC = {
    "c10d::barrier",
    "c10d::monitored_barrier_",
    "_c10d_functional::wait_tensor",
    "_c10d_functional::wait_tensors",
    "_c10d_functional::_wrap_tensor_autograd",
}


class CommCounter(TorchDispatchMode):
    """Counts the collectives inside its `with` block.

    with CommCounter({"0": "replicate"}) as traffic:
        next(updates)
    traffic.collectives()

    `names` gives the name of the mesh axis for the name of its process group.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self.names = names
        self.counts: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.observers = contextlib.ExitStack()

    def __enter__(self) -> CommCounter:
        self.observers.enter_context(observed_calls(self._count_observed))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.observers.close()

    def _count_observed(self, operation: str, group: str, inputs: Sequence[Tensor]) -> None:
        if operation != "barrier":
            key = operation, self.names.get(group, group)
            self.counts[key] += 1
            self.bytes[key] += sum(tensor.nbytes for tensor in inputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor decomposes it first; its collectives then reach this mode
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.name().partition(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _count(self, operator: str, args: Any) -> None:
        if operator in _NO_TRAFFIC or any(isinstance(value, str) and is_observed(value) for value in args):
            return
        # an operator that is not in the table is counted under its own name rather than left out
        operation, index = _OPERATORS.get(operator, (operator, 0))
        key = operation, self._group(args)
        self.counts[key] += 1
        self.bytes[key] += sum(tensor.numel() * tensor.element_size() for tensor in _tensors(args[index]))

    def _group(self, args: Any) -> str:
        for value in args:
            if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):  # pyright: ignore
                name = dist.ProcessGroup.unbox(value).group_name  # pyright: ignore[reportAttributeAccessIssue]
                return self.names.get(name, name)
            if isinstance(value, str) and value in self.names:
                return self.names[value]
        return "all"

    def collectives(self, updates: int = 1) -> list[Collective]:
        """Return the collectives of each operation, counted over `updates` updates."""
        return [
            Collective(op, group, count, self.bytes[op, group], updates)
            for (op, group), count in sorted(self.counts.items())
        ]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
