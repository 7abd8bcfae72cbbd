"""What `everyrank comm` is asked: which operations, sizes, dtype and groups. Imports no torch."""

from __future__ import annotations

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
"""Names of `torch.distributed.ReduceOp`, in lower case; those of bits for whole numbers alone."""
DTYPE_BYTES = {"float32": 4, "float64": 8, "bf16": 2, "fp16": 2, "int64": 8}
"""Bytes of an element."""
REDUCING = ("reduce", "all_reduce", "reduce_scatter")
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_STEP = 4  # from one size of a range to the next
_DEFAULT_SIZES = "4:64MiB"


@dataclass(frozen=True)
class CommOptions:
    """What is asked of each backend. Raises `UsageError` for what does not go together.

    backends     names, the first of which the others are compared with; empty: the one that suits the device
    operations   names out of `OPERATION_NAMES`; empty: all
    sizes        bytes of the largest tensor that a rank hands in, or gets
    dtype        out of `DTYPE_BYTES`
    reduction    out of `REDUCTION_NAMES`, for the operations that reduce
    algorithms   out of `ALGORITHM_NAMES`: `all_reduce` in plain sends and receives, beside the backend's own
    is_async     called with async_op=True, and waited for
    group_size   ranks of each group; the groups work at the same time. None: one group of all ranks
    seconds      how long each operation is repeated for at each size, on the average of backends and algorithms
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
            twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
            if twice is not None:
                raise UsageError(f"{flag} {' '.join(names)}: {twice} stands there twice; give each once")
        if self.algorithms:
            self._check_algorithms()
        is_whole = self.dtype == "int64"
        if self.reduction in ("band", "bor", "bxor") and not is_whole:
            raise UsageError(f"--reduction {self.reduction}: it is of bits; give --dtype int64")
        if self.reduction == "avg" and is_whole:
            raise UsageError("--reduction avg: whole numbers have no exact average; give a floating --dtype")
        if self.seconds <= 0:
            raise UsageError(f"--seconds {self.seconds:g}: give more than 0")
        if self.group_size is not None and self.group_size < 1:
            raise UsageError(f"--group-size {self.group_size}: give 1 or more")
        if self.group_size is not None and "horovod" in self.backends:
            raise UsageError("--backend horovod: its group is that of all ranks; leave out --group-size, or horovod")

    def _check_algorithms(self) -> None:
        named = f"--algorithm {' '.join(self.algorithms)}"
        if "all" in self.algorithms and len(self.algorithms) > 1:
            raise UsageError(f"{named}: all are all; give it alone")
        if set(self.operations) != {"all_reduce"}:
            raise UsageError(f"{named}: the algorithms are of all_reduce; give --op all_reduce")
        if self.reduction != "sum" or self.is_async:
            raise UsageError(f"{named}: it adds up, and waits; leave out --reduction and --async")

    @property
    def asked_algorithms(self) -> tuple[str | None, ...]:
        """Those that take turns for each backend: None for its own, first."""
        return (None, *(ALGORITHM_NAMES if self.algorithms == ("all",) else self.algorithms))

    @property
    def asked_operations(self) -> tuple[str, ...]:
        """Those to be tried, in the order of the table; where a reduction is named, those that reduce."""
        if self.operations:
            return tuple(dict.fromkeys(self.operations))
        return REDUCING if self.reduction != "sum" else OPERATION_NAMES


def parse_sizes(words: Sequence[str]) -> tuple[int, ...]:
    """Bytes: `64KiB`, several of them, or a range `4:64MiB`, four times as much each. Raises `UsageError`."""
    sizes: list[int] = []
    for word in words or [_DEFAULT_SIZES]:
        low, colon, high = word.partition(":")
        first = _bytes_of(low, word)
        last = _bytes_of(high, word) if colon else first
        if first > last:
            raise UsageError(f"--sizes {word}: give the smaller size first")
        while first <= last:
            sizes.append(first)
            first *= _STEP
    return tuple(dict.fromkeys(sizes))


def _bytes_of(text: str, word: str) -> int:
    match = re.fullmatch(r"(\d{1,15})\s*([A-Za-z]*)", text)
    if match is None or match[2].upper() not in _UNITS or int(match[1]) == 0:
        raise UsageError(f"--sizes {word}: give bytes, as in 64KiB, or a range, as in 4:64MiB")
    return int(match[1]) * _UNITS[match[2].upper()]


def size_text(num_bytes: int) -> str:
    """`64 KiB`: in the largest unit of 1024 in which it is a whole number."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor} {unit}"
    return f"{num_bytes} B"
