"""The helper functions of a port, called without a process group."""

from __future__ import annotations

import os
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from everyrank.port.helpers import helper_text


def helpers(*names: str) -> dict[str, Any]:
    """Return the helper functions of rank 1 of 2."""
    text = helper_text(set(names), has_batch_norm=False, finds_unused=False, sums=False, has_numpy=False)
    dist = SimpleNamespace(get_rank=lambda: 1, get_world_size=lambda: 2, broadcast=lambda *_: None)
    namespace: dict[str, Any] = {"torch": torch, "os": os, "tempfile": tempfile, "dist": dist}
    exec(text, namespace)
    return namespace


def test_split_loader_keeps_its_settings() -> None:
    """Scripts read the batch size and the sampler of a loader, for example in len(loader.sampler)."""
    sampler = SubsetRandomSampler(range(4, 20))
    data = TensorDataset(torch.arange(24))
    loader = DataLoader(data, batch_size=8, sampler=sampler, timeout=0.5, num_workers=1)
    split_loader = helpers("split")["split"](loader)
    assert (split_loader.batch_size, split_loader.sampler, split_loader.timeout) == (8, sampler, 0.5)
    assert len(split_loader) == 2
    split_loader.num_workers = split_loader.timeout = 0
    batches = [batch.tolist() for (batch,) in split_loader]
    assert [len(batch) for batch in batches] == [4, 4]
    assert {index for batch in batches for index in batch} < set(range(4, 20))


def test_folder_of_a_silent_logger_is_a_path() -> None:
    """Scripts put a file of their own into it: os.path.join(writer.log_dir, "training.log")."""
    folder = os.path.join(helpers("Silent")["Silent"]().log_dir, "")  # noqa: PTH118
    assert os.path.isdir(folder)  # noqa: PTH112
    os.rmdir(folder)  # noqa: PTH106
