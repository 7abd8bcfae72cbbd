"""Predictions: the file of rows, and rows that do not fit into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo
from everyrank.data import Batch
from everyrank.errors import UsageError, WorkloadError
from everyrank.prediction.files import open_predictions
from everyrank.prediction.rank import _rows_of_real_samples, _rows_or_empty
from everyrank.world import World


def write_batches(path: Path, *batches: Any) -> None:
    """Write these batches of rows one after the other."""
    with open_predictions(path, sum(map(len, batches))) as write:
        first = 0
        for rows in batches:
            write(first, rows)
            first += len(rows)


@pytest.mark.parametrize(
    ("second", "fragment"),
    [
        (np.zeros((2, 1), np.float32), "shape (1,), float32, in a later one"),
        (np.zeros((2, 5), np.float32), "shape (5,), float32, in a later one"),
        (np.zeros((2, 3), np.int64), "shape (3,), int64, in a later one"),
        (np.zeros(2, np.float32), "shape (), float32, in a later one"),
    ],
)
def test_npy_refuses_rows_unlike_those_of_the_first_batch(second: Any, fragment: str, tmp_path: Path) -> None:
    """numpy would broadcast rows of shape (1,), and cast floats to whole numbers."""
    with pytest.raises(WorkloadError) as caught:
        write_batches(tmp_path / "p.npy", np.zeros((4, 3), np.float32), second)
    assert fragment in str(caught.value)
    assert "shape (3,), float32, in the first batch" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_batches_are_written_one_after_the_other(tmp_path: Path) -> None:
    """A file .jsonl may have rows of different shapes, for example text padded to the longest of its batch."""
    write_batches(tmp_path / "p.npy", np.ones((2, 3)), np.zeros((1, 3)))
    assert np.load(tmp_path / "p.npy").tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    write_batches(tmp_path / "p.jsonl", np.ones((1, 2)), np.zeros((1, 1)))
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert rows == [{"index": 0, "prediction": [1, 1]}, {"index": 1, "prediction": [0]}]


@pytest.mark.parametrize("name", ["p.npy", "p.jsonl"])
def test_file_without_rows(name: str, tmp_path: Path) -> None:
    """Data without a sample gives an empty array or file."""
    write_batches(tmp_path / name)
    assert len(np.load(tmp_path / name)) == 0 if name == "p.npy" else (tmp_path / name).read_text() == ""


@pytest.mark.parametrize("place", ["file/p.npy", "file/p.jsonl", f"{'n' * 250}.jsonl"])
def test_path_that_cannot_be_written_is_named(place: str, tmp_path: Path) -> None:
    """The partial file of such a path cannot be removed either."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        write_batches(tmp_path / place, np.zeros(3))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full")
@pytest.mark.parametrize("suffix", ["jsonl", "npy"])
@pytest.mark.parametrize("count", [3, 100_000])
def test_full_disk_is_named(suffix: str, count: int, tmp_path: Path) -> None:
    """A small file is still in memory when the last row has been written."""
    (tmp_path / f"p.{suffix}.partial").symlink_to("/dev/full")
    with pytest.raises(UsageError, match=rf"--out .*p\.{suffix}: cannot be written \(No space left"):
        write_batches(tmp_path / f"p.{suffix}", np.zeros(count))


def test_error_inside_the_block_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="image"), open_predictions(tmp_path / "p.jsonl", 3):
        raise FileNotFoundError("image.png")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.float8_e4m3fn])
def test_predictions_of_a_dtype_without_a_file_format_are_refused(dtype: torch.dtype) -> None:
    batch = Batch(torch.zeros(4, 1), torch.zeros(4), 4, 0, 4)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(WorkloadError, match=f"rows of {name} cannot be written; give Workload.predict"):
        _rows_of_real_samples(zoo.workload("frozen", predict=None), torch.zeros(4, 2).to(dtype), batch)


def rows_of_two_dtypes(world: World) -> str:
    rows = torch.zeros(2) if world.rank else torch.zeros(2, dtype=torch.int64)
    try:
        _rows_or_empty(rows, world)
    except WorkloadError as error:
        return str(error)
    return ""


def test_dtypes_that_differ_between_ranks_are_named(ranks: Any) -> None:
    """Both shapes are equal, so the message has the dtypes."""
    for text in ranks(2, rows_of_two_dtypes):
        assert "shape (), float32, on one rank and shape (), int64, on another" in text
