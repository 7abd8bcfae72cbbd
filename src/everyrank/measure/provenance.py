"""Provenance of a Record: versions, hardware, threads, commit, data, command."""

from __future__ import annotations

import ctypes
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch

from everyrank import _version
from everyrank.data import is_uncounted
from everyrank.launch import num_cores
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["machine", "provenance"]


def provenance(workload: Workload, dataset: Any, world: World, command: list[str]) -> dict[str, Any]:
    """Return the settings and versions that repeat the run. `data_checksum` is the dataset's `checksum`, if any."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        **machine(world),
        "settings": dict(workload.source.settings) if workload.source else {},
        "global_batch": workload.global_batch,
        "seed": workload.seed,
        "train_samples": None if is_uncounted(dataset) else len(dataset),
        "data_checksum": getattr(dataset, "checksum", None),
    }


def machine(world: World) -> dict[str, Any]:
    """Return versions, hardware, and the automatic choices of the ranks."""
    is_cuda = world.device.type == "cuda"
    return {
        "everyrank": _version.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": num_cores(),
        "threads_per_rank": world.threads,
        "loader_workers_per_rank": world.loader_workers,
        "hosts": list(dict.fromkeys(world.hosts)),
        "choices": dict(world.choices),
        "accelerator": torch.cuda.get_device_name(world.device) if is_cuda else None,
        "cuda": torch.version.cuda if is_cuda else None,
        **({"cuda_details": _cuda_details()} if is_cuda else {}),
    }


def _cuda_details() -> dict[str, Any]:
    """Return the versions of the CUDA libraries, and whether float32 matrix products and convolutions use TF32."""
    cuda = cast("Any", torch.cuda)
    return {
        "nccl": ".".join(map(str, cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        "driver": _driver_version(),
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
        "tf32_convolution": torch.backends.cudnn.allow_tf32,
    }


def _driver_version() -> int | None:
    """Return the CUDA version of the driver as CUDA counts (12040), from its library; None without one (ROCm)."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value


def _commit() -> str | None:
    """Return the commit of everyrank's checkout, with `-dirty` if files have changed; None for an installed wheel."""
    root = Path(_version.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        completed = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],  # noqa: S607
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout.strip()


def _processor() -> str:
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()
