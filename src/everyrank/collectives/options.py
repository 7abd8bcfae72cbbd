"""The options of `everyrank comm`: operations, sizes, dtype and groups. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from everyrank.errors import UsageError

__all__ = [
    "ALGORITHM_NAMES",
    "DTYPE_BYTES",
    "OPERATION_NAMES",
    "REDUCING",
    "REDUCTION_NAMES",
    "CommOptions",
    "parse_sizes",
    "size_text",
]

OPERATION_NAMES = (
    *("send", "isend", "batch_isend_irecv", "broadcast", "reduce", "all_reduce", "gather", "scatter", "all_gather"),
    *("all_gather_into_tensor", "reduce_scatter", "all_to_all", "all_to_all_uneven", "barrier", "monitored_barrier"),
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list"),
)
ALGORITHM_NAMES = ("ring", "halving", "tree", "server", "hierarchical")
REDUCTION_NAMES = ("sum", "product", "min", "max", "avg", "band", "bor", "bxor")
"""Names of `torch.distributed.ReduceOp` in lower case; band, bor and bxor need integers."""
DTYPE_BYTES = {"float32": 4, "float64": 8, "bf16": 2, "fp16": 2, "int64": 8}
"""Bytes of an element."""
REDUCING = ("reduce", "all_reduce", "reduce_scatter")
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_STEP = 4  # factor between the sizes of a range
_DEFAULT_SIZES = "4:64MiB"


@dataclass(frozen=True)
class CommOptions:
    """The options. Raises `UsageError` for unknown values and combinations that do not work.

    backends     names of backends, compared with the first; empty: the default for the device
    operations   names in `OPERATION_NAMES`; empty: all
    sizes        bytes of the largest input or output tensor of a rank
    dtype        a name in `DTYPE_BYTES`
    reduction    a name in `REDUCTION_NAMES`, for operations that reduce
    algorithms   names in `ALGORITHM_NAMES`: our own all_reduce, compared with that of the backend
    is_async     call with async_op=True, then wait
    group_size   ranks in each group; the groups run at the same time. None: one group of all ranks
    seconds      time for each operation and size, averaged over backends and algorithms
    """

    backends: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    dtype: str = "float32"
    reduction: str = "sum"
    algorithms: tuple[str, ...] = ()
    is_async: bool = False
    group_size: int | None = None
    seconds: float = 0.2

    def __post_init__(self) -> None:
        for flag, value, known in (
            *(("--op", name, OPERATION_NAMES) for name in self.operations),
            ("--dtype", self.dtype, tuple(DTYPE_BYTES)),
            ("--reduction", self.reduction, REDUCTION_NAMES),
            *(("--algorithm", name, (*ALGORITHM_NAMES, "all")) for name in self.algorithms),
        ):
            if value not in known:
                raise UsageError(f"{flag} {value}: give one of {', '.join(known)}")
        for flag, names in (("--backend", self.backends), ("--algorithm", self.algorithms)):
            duplicate = next((name for index, name in enumerate(names) if name in names[:index]), None)
            if duplicate is not None:
                raise UsageError(f"{flag} {' '.join(names)}: {duplicate} is repeated; give each name once")
        if self.algorithms:
            self._check_algorithms()
        is_integer = self.dtype == "int64"
        if self.reduction in ("band", "bor", "bxor") and not is_integer:
            raise UsageError(f"--reduction {self.reduction}: needs integers; use --dtype int64")
        if self.reduction == "avg" and is_integer:
            raise UsageError("--reduction avg: not supported for integers; use a floating-point --dtype")
        if not 0 < self.seconds < math.inf:
            raise UsageError(f"--seconds {self.seconds:g}: give more than 0")
        if self.group_size is not None and self.group_size < 1:
            raise UsageError(f"--group-size {self.group_size}: give 1 or more")
        if self.group_size is not None and "horovod" in self.backends:
            raise UsageError("--backend horovod: does not support --group-size; leave one of the two out")

    def _check_algorithms(self) -> None:
        flag_text = f"--algorithm {' '.join(self.algorithms)}"
        if "all" in self.algorithms and len(self.algorithms) > 1:
            raise UsageError(f"{flag_text}: use `all` without other names")
        if set(self.operations) != {"all_reduce"}:
            raise UsageError(f"{flag_text}: only all_reduce has algorithms; use --op all_reduce")
        if self.reduction != "sum" or self.is_async:
            raise UsageError(f"{flag_text}: supports only synchronous sums; leave out --reduction and --async")

    @property
    def tested_algorithms(self) -> tuple[str | None, ...]:
        """The algorithms that take turns on each backend; the first is None, for the backend's own."""
        return (None, *(ALGORITHM_NAMES if self.algorithms == ("all",) else self.algorithms))

    @property
    def tested_operations(self) -> tuple[str, ...]:
        """The operations to test; with --reduction only those that reduce."""
        if self.operations:
            return tuple(dict.fromkeys(self.operations))
        return REDUCING if self.reduction != "sum" else OPERATION_NAMES


def parse_sizes(texts: Sequence[str]) -> tuple[int, ...]:
    """Parse sizes such as `64KiB`, or ranges such as `4:64MiB` in steps of a factor of 4. Raises `UsageError`."""
    sizes: list[int] = []
    for text in texts or [_DEFAULT_SIZES]:
        low, colon, high = text.partition(":")
        first = _bytes_of(low, text)
        last = _bytes_of(high, text) if colon else first
        if first > last:
            raise UsageError(f"--sizes {text}: give the smaller size first")
        while first <= last:
            sizes.append(first)
            first *= _STEP
    return tuple(dict.fromkeys(sizes))


def _bytes_of(size: str, text: str) -> int:
    match = re.fullmatch(r"(\d{1,15})\s*([A-Za-z]*)", size)
    if match is None or match[2].upper() not in _UNITS or int(match[1]) == 0:
        raise UsageError(f"--sizes {text}: give bytes, as in 64KiB, or a range, as in 4:64MiB")
    return int(match[1]) * _UNITS[match[2].upper()]


def size_text(num_bytes: int) -> str:
    """Format a size such as `64 KiB`, in the largest binary unit in which it is an integer."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor} {unit}"
    return f"{num_bytes} B"
