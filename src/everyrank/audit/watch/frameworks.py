"""Lightning, where there is no GPU, takes one CPU in each process for all there is: it is told of as many as ranks.

Else `Trainer()`, which is right on a host with GPUs, would train a model of its own in each process.
"""

# pyright: basic
from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from typing import Any

import torch

from everyrank.audit.watch.recorder import Recorder

__all__ = ["install_frameworks"]

_ACCELERATORS = {
    f"{package}.accelerators.cpu"
    for package in ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning")
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Changes a module of these names when its code has run."""

    def __init__(self, recorder: Recorder, num_devices: int) -> None:
        self.recorder, self.num_devices = recorder, num_devices

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name not in _ACCELERATORS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            module.CPUAccelerator.auto_device_count = staticmethod(lambda: self.num_devices)
            self.recorder.event("altered", what=f"no GPU here: Lightning is told of {self.num_devices} CPUs")

        loader.exec_module = exec_module
        return spec


def install_frameworks(recorder: Recorder) -> None:
    """For processes that a launcher has started as ranks."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_ranks > 1 and torch.cuda.device_count() == 0:
        sys.meta_path.insert(0, _AfterImport(recorder, num_ranks))
