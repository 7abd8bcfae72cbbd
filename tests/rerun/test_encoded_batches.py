"""Batches survive being written and read, in the types that the script expects."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

from everyrank.rerun.inside.batches import NotMergedError, decode_batch, encode_batch, merge_batches, rows_of_batch


class Encoding(collections.UserDict[str, Any]):
    """As transformers returns from a tokenizer."""

    def to(self, device: str) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.items()})


def test_a_mapping_of_a_library_keeps_its_class() -> None:
    parts = [encode_batch(Encoding({"ids": torch.full((2, 3), rank), "labels": torch.ones(2)})) for rank in range(2)]
    merged = decode_batch(merge_batches(parts))
    assert isinstance(merged, Encoding)
    assert merged.to("cpu")["ids"][:, 0].tolist() == [0, 0, 1, 1]
    assert rows_of_batch(parts[0]) == 2


def test_a_class_that_is_not_imported_is_read_as_a_dict() -> None:
    encoded = encode_batch(Encoding({"ids": torch.ones(2)}))
    for kind in ("no.such.module:Encoding", f"{__name__}:NoSuchName", "os:system", "builtins:dict"):
        assert type(decode_batch({**encoded, "__mapping__": kind})) is dict


def test_other_objects_are_refused() -> None:
    with pytest.raises(NotMergedError, match="object"):
        encode_batch([object()])
