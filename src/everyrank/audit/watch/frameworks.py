"""Lets Lightning train on several ranks without a GPU, by reporting as many CPUs as ranks.

Otherwise `Trainer()` would find one CPU in each process, and train a separate model on it.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from everyrank.audit.events import Altered
from everyrank.audit.watch.imports import after_import
from everyrank.audit.watch.recorder import Recorder

__all__ = ["install_frameworks"]

_ACCELERATORS = [
    f"{package}.accelerators.cpu"
    for package in ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning")
]


def install_frameworks(recorder: Recorder) -> None:
    """Patch Lightning if there is no GPU and a launcher has started several ranks on this host."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_ranks > 1 and torch.cuda.device_count() == 0:
        for name in _ACCELERATORS:
            after_import(name, functools.partial(_patch_device_count, recorder, num_ranks))


def _patch_device_count(recorder: Recorder, num_devices: int, module: Any) -> None:
    module.CPUAccelerator.auto_device_count = staticmethod(lambda: num_devices)
    recorder.write(Altered(message=f"no GPU found; Lightning counts {num_devices} CPUs as devices"))
