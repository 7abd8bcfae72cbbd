"""Which kernels torch takes: as it comes, the fastest that cuDNN finds by trying, or those that repeat to the last bit.

Neither is on unless asked for. What each costs is said in docs/training.md.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from typing import Any

import torch

from everyrank.errors import UsageError
from everyrank.options import TrainOptions

__all__ = ["chosen_kernels"]


@contextlib.contextmanager
def chosen_kernels(options: TrainOptions, device: torch.device) -> Generator[None]:
    """While a training runs with the kernels that were asked for; afterwards torch has its settings back.

    Raises `UsageError` for both at once, and for deterministic ones on CUDA without what cuBLAS needs for them.
    """
    if options.cudnn_benchmark and options.deterministic:
        raise UsageError(
            "--cudnn-benchmark and --deterministic: what is fastest may be another kernel in the next run; give one"
        )
    if options.deterministic and device.type == "cuda" and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        raise UsageError(
            "--deterministic on cuda: cuBLAS repeats with a workspace of its own alone; put "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8 in front of the command"
        )
    before = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    if options.deterministic:
        torch.use_deterministic_algorithms(True)
        # NaN in all that torch.empty gives would show who reads it, at the cost of writing it
        memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before[0]
        torch.use_deterministic_algorithms(before[1])
        memory.fill_uninitialized_memory = fills
