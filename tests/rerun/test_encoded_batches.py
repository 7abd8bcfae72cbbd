"""Batches are encoded, merged and decoded again with the types that the script expects."""

from __future__ import annotations

import collections
import enum
import math
from typing import Any

import numpy as np
import pytest
import torch

from everyrank.rerun.inside.batches import (
    NotMergedError,
    decode_batch,
    encode_batch,
    is_equal,
    merge_batches,
    rows_of_batch,
)


class Encoding(collections.UserDict[str, Any]):
    """A mapping with a method `to`, like the result of a transformers tokenizer."""

    def to(self, device: str) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.items()})


def test_merged_mapping_keeps_its_class() -> None:
    """The merged batch of two ranks has all rows and still has the method `to`."""
    encoded_batches = [
        encode_batch(Encoding({"ids": torch.full((2, 3), rank), "labels": torch.ones(2)})) for rank in range(2)
    ]
    merged = decode_batch(merge_batches(encoded_batches))
    assert isinstance(merged, Encoding)
    assert merged.to("cpu")["ids"][:, 0].tolist() == [0, 0, 1, 1]
    assert rows_of_batch(encoded_batches[0]) == 2


def test_unknown_mapping_class_is_decoded_as_dict() -> None:
    """The name of a class in an encoded batch is not a reason to import or call anything."""
    encoded = encode_batch(Encoding({"ids": torch.ones(2)}))
    for class_name in ("no.such.module:Encoding", f"{__name__}:NoSuchName", "os:system", "builtins:dict"):
        assert type(decode_batch({**encoded, "__mapping__": class_name})) is dict


class Split(enum.IntEnum):
    """A number that torch.load does not support."""

    TRAIN = 1


@pytest.mark.parametrize(
    "value", [object(), Split.TRAIN, {Split.TRAIN: 1}, np.longdouble(1), np.ones(2, np.longdouble)]
)
def test_batch_of_arbitrary_objects_is_refused(value: object) -> None:
    """A batch of arbitrary objects cannot be merged, and neither can numbers that cannot be read back."""
    with pytest.raises(NotMergedError, match="cannot be merged"):
        encode_batch([value])


def test_array_in_the_byte_order_of_a_file_is_merged() -> None:
    """Files such as those of MNIST hold the most significant byte first."""
    encoded = encode_batch(np.array([1, 258], dtype=">i4"))
    assert decode_batch(merge_batches([encoded, encoded])).tolist() == [1, 258, 1, 258]


@pytest.mark.parametrize(
    "value", [torch.tensor([1.0, math.nan]), torch.tensor(math.nan), math.nan, torch.eye(2).to_sparse()]
)
def test_equal_batches_with_missing_values_are_equal(value: Any) -> None:
    """All ranks evaluate the same batch, so it is not merged."""
    assert is_equal([value], encode_batch([value]))
    assert not is_equal([value], [torch.zeros(3)])


def test_missing_value_that_all_ranks_share_is_kept() -> None:
    assert math.isnan(merge_batches([{"bound": math.nan}, {"bound": math.nan}])["bound"])
    with pytest.raises(NotMergedError, match="a number or text without"):
        merge_batches(["left", "right"])
