"""Who am I: the rank facts of one process, read as one full set from whoever started it, never mixed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from everyrank.errors import UsageError

__all__ = ["RankFacts", "facts_from_environment", "num_accelerators", "num_cores"]

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankFacts:
    """The place of one process among all.

    rank, size              over all hosts
    local_rank, local_size  on this host
    started_by              spawn, torchrun or env
    rendezvous              where the ranks meet: file:///path or tcp://host:port
    hosts_store             whether this process opens the tcp store (else somebody else has it open)
    attempt                 counts restarts by an elastic launcher

    Raises `UsageError` when the numbers contradict each other.
    """

    rank: int
    local_rank: int
    size: int
    local_size: int
    started_by: str
    rendezvous: str
    hosts_store: bool = False
    attempt: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise UsageError(f"{self.started_by}: rank {self.rank} is not below the world size {self.size}")
        if not 0 <= self.local_rank < self.local_size <= self.size:
            raise UsageError(
                f"{self.started_by}: local rank {self.local_rank}, local world size {self.local_size} "
                f"and world size {self.size} contradict each other"
            )


def facts_from_environment(environment: Mapping[str, str]) -> RankFacts | None:
    """The facts that torchrun, or a person, put into the environment; None where nobody started us as a rank.

    Raises `UsageError` for an incomplete set: facts from two sources are never mixed.
    """
    present = [name for name in _VARIABLES if environment.get(name)]
    if "RANK" not in present and "WORLD_SIZE" not in present:
        return None
    missing = [name for name in _VARIABLES if name not in present]
    if missing:
        raise UsageError(
            f"the environment has {', '.join(present)} but not {', '.join(missing)}: "
            f"start with torchrun, or unset {present[0]}"
        )
    numbers: dict[str, int] = {}
    for name in (*_VARIABLES[:4], "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"):
        text = environment.get(name, "0")
        try:
            numbers[name] = int(text)
        except ValueError:
            raise UsageError(f"{name}={text} in the environment: it must be a whole number") from None
    torchrun = "TORCHELASTIC_RUN_ID" in environment
    agent_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankFacts(
        rank=numbers["RANK"],
        local_rank=numbers["LOCAL_RANK"],
        size=numbers["WORLD_SIZE"],
        local_size=numbers["LOCAL_WORLD_SIZE"],
        started_by="torchrun" if torchrun else "env",
        rendezvous=f"tcp://{environment['MASTER_ADDR']}:{numbers['MASTER_PORT']}",
        hosts_store=numbers["RANK"] == 0 and not agent_store,
        attempt=numbers["TORCHELASTIC_RESTART_COUNT"],
    )


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_accelerators() -> int:
    """CUDA devices that torch sees. Without a driver's device file there are none, and torch is not imported."""
    drivers = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # Linux, WSL, ROCm
    if not any(Path(driver).exists() for driver in drivers):
        return 0
    import torch

    return torch.cuda.device_count()
