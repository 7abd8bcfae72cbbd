"""The place of one process among all, and what this host has for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everyrank.errors import UsageError

__all__ = ["CPU_PROCESSES", "RankInfo", "cgroup_quota", "has_driver", "num_accelerators", "num_cores"]


@dataclass(frozen=True)
class RankInfo:
    """The place of one process among all.

    rank, size              over all hosts
    local_rank, local_size  on this host
    started_by              spawn, torchrun, slurm, mpi, ray or env
    rendezvous_url          where the ranks meet: file:///path, tcp://host:port, or meet:///path (a file in which
                            rank 0 says where it has opened a store); empty where nobody has said
    is_store_master         whether this process opens the tcp store (else somebody else has it open)
    restart_count           how often an elastic launcher has started all ranks again; not by how many it has changed
                            their number, and of several hosts each has a count of its own
    store_round             what tells this start from earlier ones in a store that outlives them; 0: it does not
    threads                 CPU threads of each process that a person has asked for (OMP_NUM_THREADS); None: nobody has
    fail                    ends this process with an error, where its main thread waits for others and cannot
    keep                    leaves a result so far with whoever started the ranks, for the case that there is no other

    Raises `UsageError` when the numbers contradict each other.
    """

    rank: int
    local_rank: int
    size: int
    local_size: int
    started_by: str
    rendezvous_url: str
    is_store_master: bool = False
    restart_count: int = 0
    store_round: int = 0
    threads: int | None = None
    fail: Callable[[BaseException], None] | None = field(default=None, compare=False)
    keep: Callable[[Any], None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise UsageError(f"{self.started_by}: rank {self.rank} is not below the world size {self.size}")
        if not 0 <= self.local_rank < self.local_size <= self.size:
            raise UsageError(
                f"{self.started_by}: local rank {self.local_rank}, local world size {self.local_size} "
                f"and world size {self.size} contradict each other"
            )


def num_cores() -> int:
    """Cores that this process may use: those it may run on, or fewer where its container may use fewer on average."""
    seen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(Path("/sys/fs/cgroup"))
    return seen if quota is None else max(1, min(seen, int(quota)))


def cgroup_quota(folder: Path) -> float | None:
    """Cores that the container may use on average (cgroup 2, then 1); None without a limit, or where none is read."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = (folder / "cpu.max").read_text().split()
        return None if text[0] == "max" else int(text[0]) / int(text[1])
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota = int((folder / "cpu" / "cpu.cfs_quota_us").read_text())
        return quota / int((folder / "cpu" / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    return None


CPU_PROCESSES = 2
"""Processes where nobody says how many and there is no GPU: the fewest with which a parallel layout does something."""


def num_accelerators() -> int:
    """CUDA devices that torch sees. Without a driver there are none, and torch is not imported."""
    if not has_driver():
        return 0
    import torch

    return torch.cuda.device_count()


def has_driver() -> bool:
    """Whether there is the device file of a driver of GPUs: on Linux, under WSL, of ROCm."""
    return any(Path(driver).exists() for driver in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))
