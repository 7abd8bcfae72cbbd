"""Check that each sample is read once in every epoch and counted once in the evaluation.

The real loader reads the real dataset under the layout; only the content of each sample is replaced by its number.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from everyrank.data import (
    Slice,
    Streamed,
    UnevenStreams,
    all_updates,
    batches_for_evaluation,
    batches_for_updates,
    epoch_of,
)
from everyrank.data.order import sample_numbers as epoch_numbers
from everyrank.data.parts import Keys, order_of
from everyrank.data.seeds import seed_sample
from everyrank.data.stream import StreamReader
from everyrank.data.uneven import UnevenKeys, UnevenReader
from everyrank.layout import Layout
from everyrank.loop import wrap_user_errors
from everyrank.parallel.mesh import Mesh
from everyrank.workload import Workload, changed
from everyrank.world import World
from everyrank.world.collectives import all_gather

__all__ = ["check_samples", "sample_errors"]

_NUM_EPOCHS = 2
_NUM_COMPARED = 64  # samples whose content is compared between ranks


def check_samples(
    workload: Workload, train_data: Any, eval_data: Any, layout: Layout, mesh: Mesh
) -> tuple[list[str], str]:
    """Return the errors ([] for none) and a summary. The result is the same on every rank. A collective."""
    problems = _differences(workload, train_data, mesh.world)
    left_out = len(train_data) - epoch_of(workload, train_data).samples
    orders = _orders_of_epochs(workload, train_data, layout, mesh)
    for epoch, order in enumerate(orders):
        expected = _expected(workload, train_data, epoch)
        if workload.weights is not None:  # samples repeat, so each has to be read as often as it was drawn
            expected = epoch_numbers(order_of(workload, train_data, epoch))
        problems += sample_errors(order, expected, f"epoch {epoch}", left_out)
    how_text = "each read once" if workload.weights is None else "drawn with weights, each read as often as drawn"
    text = f"{_NUM_EPOCHS} epochs of {len(train_data)} samples, {how_text}"
    text += f" except {left_out} of an incomplete last batch (drop_last)" * (left_out > 0)
    if len(train_data) > 8 and orders[0] == orders[1]:  # few samples may be shuffled into the same order twice
        problem, note = _same_order_twice(train_data)
        problems += problem
        text += note
    if eval_data is not None:
        with wrap_user_errors():
            batches = batches_for_evaluation(
                _number_workload(workload), _with_numbers(eval_data), mesh.data_slice, mesh.world, torch.float64
            )
            numbers = [number for batch in batches for number in batch.input[: batch.size].tolist()]
        problems += sample_errors(_over_ranks(numbers, mesh), _expected(workload, eval_data, 0), "evaluation")
        text += f"; {len(eval_data)} evaluated, each counted once"
    return problems, text


def _orders_of_epochs(workload: Workload, train_data: Any, layout: Layout, mesh: Mesh) -> list[list[int]]:
    """Return the samples that all ranks read in each epoch, through the loader of a training. A collective."""
    per_epoch = epoch_of(workload, train_data).updates
    updates = list(all_updates(_NUM_EPOCHS * per_epoch, per_epoch))
    batches = batches_for_updates(
        _number_workload(workload),
        _with_numbers(train_data),
        updates,
        mesh.data_slice,
        layout.accumulate,
        mesh.world,
        torch.float64,
    )
    local_orders: list[list[int]] = [[] for _ in range(_NUM_EPOCHS)]
    with wrap_user_errors():
        for update, parts in zip(updates, batches, strict=True):
            for batch in parts:
                local_orders[update.epoch] += batch.input[: batch.size].tolist()
    return [_over_ranks(numbers, mesh) for numbers in local_orders]


def _number_workload(workload: Workload) -> Workload:
    """Return the workload with batches that hold only the numbers of their samples."""
    return changed(workload, collate=_numbers)


def _same_order_twice(train_data: Any) -> tuple[list[str], str]:
    """Return (errors, note) for two epochs with the same sample order."""
    streams: list[Any] = []
    if isinstance(train_data, UnevenStreams):
        streams = list(train_data.streams)
    elif isinstance(train_data, Streamed):
        streams = [train_data.dataset]
    is_stream = bool(streams)
    keeps_order = any(getattr(stream, "keeps_order", False) for stream in streams)
    if keeps_order or (is_stream and not any(hasattr(stream, "set_epoch") for stream in streams)):
        return [], " (a stream, in the same order in both)"
    hint = "; if the order has to stay, give the stream keeps_order = True" if is_stream else ""
    return [
        f"epoch 1 has the order of epoch 0: the epoch does not reach the order of the samples (set_epoch){hint}"
    ], ""


def _differences(workload: Workload, data: Any, world: World) -> list[str]:
    """Return an error if samples differ between ranks, for example because the dataset divides itself by rank."""
    if isinstance(data, Streamed | UnevenStreams) or world.size == 1:
        return []
    chosen = spread_indices(len(data), _NUM_COMPARED)
    fingerprints: list[int] = []
    with wrap_user_errors():
        for index in chosen:
            seed_sample(workload.seed, 0, index)
            fingerprints.append(sample_fingerprint(data[index]))
    rows = all_gather(torch.tensor(fingerprints, dtype=torch.int64), world)
    for rank, row in enumerate(rows):
        if not torch.equal(row, rows[0]):
            first = chosen[int((row != rows[0]).nonzero()[0])]
            return [
                f"sample {first} of train_data is not the same on rank {rank} as on rank 0: the dataset divides "
                "itself, or draws from generators without a fixed seed; return all of the data on every rank"
            ]
    return []


def spread_indices(length: int, count: int) -> list[int]:
    """Return at most `count` evenly spread indices of a sequence, with the first and the last one."""
    # in whole numbers: in float32 the last index of 33 million samples is rounded up
    return sorted({index * (length - 1) // max(1, count - 1) for index in range(count)} if length else set())


def _expected(workload: Workload, data: Any, epoch: int) -> list[int]:
    """Return the numbers of all samples, once each in any order; fingerprints for a stream."""
    if isinstance(data, UnevenStreams):
        return _expected_of_streams(workload, _with_numbers(data), epoch)
    if not isinstance(data, Streamed):
        return list(range(len(data)))
    reader = StreamReader(_with_numbers(data), workload.seed)
    with wrap_user_errors():
        return [number for index in range(len(data)) for number in reader.__getitems__(Keys(epoch, [index]))]


def _expected_of_streams(workload: Workload, data: UnevenStreams, epoch: int) -> list[int]:
    """Return the fingerprints of uneven streams, read by one reader."""
    reader = UnevenReader(data, workload, Slice(0, 1), 1)
    with wrap_user_errors():
        updates = [reader.__getitems__(UnevenKeys(epoch, index, 0)) for index in range(data.epoch(workload).updates)]
    return [number for size, numbers, _ in updates for number in numbers[:size]]


def sample_errors(numbers: Sequence[int], expected: Sequence[int] | int, subject: str, left_out: int = 0) -> list[str]:
    """Compare the sample numbers that were read with the expected ones. Returns the errors, [] for none.

    expected   the numbers to read, each once, or their count
    left_out   how many of them may be missing
    """
    expected_counts = Counter(range(expected) if isinstance(expected, int) else expected)
    length = sum(expected_counts.values())
    read_counts = Counter(numbers)
    first_index: dict[int, int] = {}  # a sample of a stream is reported by its first position
    for index, number in enumerate(range(expected) if isinstance(expected, int) else expected):
        first_index.setdefault(number, index)
    missing = [first_index[number] for number, count in expected_counts.items() if read_counts[number] < count]
    repeated = [first_index[number] for number, count in read_counts.items() if 0 < expected_counts[number] < count]
    unknown = [number for number in read_counts if number not in expected_counts]
    result: list[str] = []
    if len(missing) > left_out:
        result.append(f"{subject}: {len(missing)} of {length} samples were never read, the first is {min(missing)}")
    if repeated:
        result.append(
            f"{subject}: {len(repeated)} of {length} samples were read more than once, the first is {repeated[0]}"
        )
    if unknown:
        result.append(
            f"{subject}: {len(unknown)} samples are not among the {length} expected, the first is {unknown[0]}"
        )
    return result


def sample_fingerprint(sample: Any) -> int:
    """Return 63 bits of BLAKE2b over all values of a sample."""
    content = hashlib.blake2b(digest_size=8)

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            content.update(f"{value.dtype}{tuple(value.shape)}".encode())
            content.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            for key in value:
                content.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, tuple | list):
            content.update(f"{len(value)}".encode())
            for item in value:
                add(item)
        elif isinstance(value, np.ndarray) and value.dtype != object:
            content.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
        elif isinstance(value, np.ndarray):
            add(value.tolist())
        elif isinstance(value, set | frozenset):
            content.update("".join(sorted(map(repr, value))).encode())
        elif hasattr(value, "tobytes"):  # an image
            content.update(value.tobytes())
        elif type(value).__repr__ is object.__repr__ or dataclasses.is_dataclass(value):  # repr would be an address
            content.update(type(value).__qualname__.encode())
            add(vars(value) if hasattr(value, "__dict__") else ())
        else:
            content.update(repr(value).encode())

    add(sample)
    return int.from_bytes(content.digest()) >> 1


def _with_numbers(data: Any) -> Any:
    """Wrap the data to yield sample numbers, or fingerprints for streams, after really reading the samples."""
    if isinstance(data, UnevenStreams):
        return UnevenStreams(data, [_FingerprintStream(stream) for stream in data.streams], data.lengths, data.is_whole)
    if isinstance(data, Streamed):
        return Streamed(_FingerprintStream(data.dataset), len(data), data.is_whole)
    return _Numbered(data)


class _Numbered(Dataset[int]):
    """A dataset that reads the samples but returns their numbers."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.shard_sizes: Sequence[int] | None = getattr(dataset, "shard_sizes", None)

    def __getitem__(self, index: int) -> int:
        self.dataset[index]
        return index

    def __len__(self) -> int:
        return len(self.dataset)


class _FingerprintStream:
    """A stream that yields the fingerprints of its items, computed before `decode`."""

    same_draws_every_epoch = True

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        # fingerprints are made before `decode` draws numbers; a stream without `decode` is seeded as in training
        self.deterministic = hasattr(dataset, "decode") or getattr(dataset, "deterministic", False)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on if the stream has `set_epoch`."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return (sample_fingerprint(item) for item in self.dataset)


def _numbers(samples: Sequence[Any]) -> tuple[Tensor, Tensor]:
    numbers = torch.tensor(list(samples))
    return numbers, numbers


def _over_ranks(numbers: list[int], mesh: Mesh) -> list[int]:
    """Gather the numbers read by all ranks; ranks that read the same samples count once. A collective."""
    local_numbers = numbers if mesh.is_first("pipeline", "context", "tensor") else []
    rows = all_gather(torch.tensor(local_numbers, dtype=torch.int64), mesh.world)
    return [number for row in rows for number in row.tolist()]
