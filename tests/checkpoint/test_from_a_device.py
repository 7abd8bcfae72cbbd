"""`--save-async` on the way that it takes on CUDA: out of a pretended device's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from everyrank.checkpoint.saver import copies_on_cpu
from pretended_card import moved_to_card, pretended_cards
from round_trips import round_trip


@pytest.mark.parametrize("layout", [pytest.param("fsdp:tensor=2", marks=pytest.mark.integration), "pipeline:shard=2"])
def test_round_trip(ranks: Any, tmp_path: Path, layout: str) -> None:
    """Parts of a mesh that are not its first ranks, replicas and stages; all meshes are in tests/integration."""
    round_trip(ranks, 4, layout, tmp_path)


def test_model_on_two_devices() -> None:
    """devices=2: what lies on the second device is waited for, too; and once for each, not for each tensor."""
    tensors = {f"model/{name}": torch.arange(4.0) + name for name in range(6)}
    with pretended_cards() as waits:
        copies = copies_on_cpu({name: moved_to_card(one, at % 2) for at, (name, one) in enumerate(tensors.items())})
    assert waits == ["synchronize"] * 2
    for name, tensor in tensors.items():
        assert torch.equal(copies[name], tensor)
        tensor.zero_()
        assert not torch.equal(copies[name], tensor), "a copy of its own"
