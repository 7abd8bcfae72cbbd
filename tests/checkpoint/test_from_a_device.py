"""`--save-async` copies tensors from device memory to the host; the device is simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from everyrank.checkpoint.saver import copies_on_cpu
from round_trips import round_trip
from simulated_gpu import simulated_gpus, to_simulated_gpu


@pytest.mark.parametrize("layout", [pytest.param("fsdp:tensor=2", marks=pytest.mark.integration), "pipeline:shard=2"])
def test_asynchronous_checkpoint_is_restored(ranks: Any, tmp_path: Path, layout: str) -> None:
    """Layouts with shards that are not on the first ranks of the mesh, with replicas and with stages.

    The other meshes are in tests/integration.
    """
    round_trip(ranks, 4, layout, tmp_path)


def test_copies_wait_once_for_each_of_two_devices() -> None:
    """With devices=2, the host synchronizes with each device once, and not once for each tensor."""
    tensors = {f"model/{name}": torch.arange(4.0) + name for name in range(6)}
    with simulated_gpus() as waits:
        copies = copies_on_cpu(
            {name: to_simulated_gpu(value, index % 2) for index, (name, value) in enumerate(tensors.items())}
        )
    assert waits == ["synchronize"] * 2
    for name, tensor in tensors.items():
        assert torch.equal(copies[name], tensor)
        tensor.zero_()
        assert not torch.equal(copies[name], tensor), "the copy shares memory with the original"
