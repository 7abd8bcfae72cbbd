"""Files of predictions: a row for each sample, in the order of the data. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import IO, Any

from everyrank.errors import UsageError, WorkloadError

__all__ = ["PREDICTION_SUFFIXES", "check_predictions_suffix", "different_rows", "open_predictions"]

PREDICTION_SUFFIXES = (".jsonl", ".npy")


def check_predictions_suffix(path: Path) -> None:
    """Raise `UsageError` for a file of a kind that cannot be written."""
    if path.suffix not in PREDICTION_SUFFIXES:
        raise UsageError(f"--out {path}: give a name that ends in {' or '.join(PREDICTION_SUFFIXES)}")


@contextlib.contextmanager
def open_predictions(path: Path, length: int) -> Generator[Callable[[int, Any], None]]:
    """Yield a function of (index of the first sample, array of predictions (B, ...)), to be called in order.

    .jsonl: {"index": 17, "prediction": 3} a row; .npy: one array of `length` rows. The file replaces an
    existing one when the block ends without an error. Raises `UsageError` if it cannot be written. For a .npy file,
    the function raises `WorkloadError` if the shape or dtype of the rows differs from the first batch.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with _blamed(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = contextlib.ExitStack()
            write = file.enter_context(_rows(partial) if path.suffix == ".jsonl" else _array(partial, length))

        def written(first: int, values: Any) -> None:
            with _blamed(path):
                write(first, values)

        try:
            yield written
        except BaseException:
            with contextlib.suppress(OSError):  # it would hide the first error
                file.close()
            raise
        with _blamed(path):
            file.close()  # writes what is still buffered
            partial.replace(path)
    finally:
        with contextlib.suppress(OSError):  # it would hide the error above, which has the same cause
            partial.unlink(missing_ok=True)


def different_rows(first: str, second: str) -> WorkloadError:
    """Return the error for rows that do not fit into one array, such as "shape (2,), float32, on one rank"."""
    return WorkloadError(
        f"predict: rows of {first} and {second}; pad all batches to one shape and cast them to one dtype, or give "
        "Workload.predict = (output) -> rows of one shape and dtype"
    )


@contextlib.contextmanager
def _blamed(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"--out {path}: cannot be written ({error.strerror}); give another path") from error


@contextlib.contextmanager
def _rows(path: Path) -> Generator[Callable[[int, Any], None]]:
    with path.open("w", encoding="utf-8") as file:
        opened: IO[str] = file

        def write(first: int, values: Sequence[Any]) -> None:
            for offset, value in enumerate(values):
                row = {"index": first + offset, "prediction": _plain(value.tolist())}
                opened.write(json.dumps(row, allow_nan=False) + "\n")

        yield write


def _plain(value: Any) -> Any:
    """Return null for NaN and infinity, which JSON does not have."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def _array(path: Path, length: int) -> Generator[Callable[[int, Any], None]]:
    # not memory-mapped: a process that writes into a mapped file on a full disk is killed, without an error
    import numpy as np
    from numpy.lib.format import dtype_to_descr, write_array_header_1_0

    kind: tuple[Any, tuple[int, ...]] | None = None

    with path.open("wb") as file:

        def write(_: int, values: Any) -> None:
            nonlocal kind
            dtype, shape = values.dtype, values.shape[1:]
            if kind is None:
                kind = dtype, shape
                header = {"descr": dtype_to_descr(dtype), "fortran_order": False, "shape": (length, *shape)}
                write_array_header_1_0(file, header)
            if kind != (dtype, shape):
                raise different_rows(
                    f"shape {kind[1]}, {kind[0]}, in the first batch", f"shape {shape}, {dtype}, in a later one"
                )
            file.write(values.tobytes())

        yield write
        if kind is None:
            np.save(file, np.empty(0))
