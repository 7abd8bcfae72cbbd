"""The numbers of one rank among all (`RankInfo`), and reading them from environment variables."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from everyrank.errors import UsageError
from everyrank.launch.host_info import start_time

__all__ = [
    "START_VARIABLES",
    "USER_VARIABLES",
    "RankInfo",
    "is_loopback_host",
    "launcher_process",
    "rank_info_of_one_host",
    "rank_info_of_task",
    "rank_info_of_user",
    "whole_number",
    "whole_numbers",
]

USER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
START_VARIABLES = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
"""Variables that name one start of the ranks: those of Open MPI and of Slurm."""


@dataclass(frozen=True)
class RankInfo:
    """The numbers of one rank among all, and where the ranks meet.

    rank, size              over all hosts
    local_rank, local_size  on this host
    started_by              the name of a launcher, or env if the user set the variables
    rendezvous_url          where the ranks meet: file:///path, tcp://host:port, http://host:port (Horovod's server), or
                            meet:///path (a file to which rank 0 writes the address of its store); "" if unknown
    is_store_master         whether this process opens the TCP store (else another process has it open)
    restart_count           how often an elastic launcher has restarted all ranks. It does not count the ranks that
                            joined or left, and each host has its own count
    store_round             number of this start in a store that survives restarts; 0 for any other store
    threads                 CPU threads per process set by the user (OMP_NUM_THREADS); None: not set
    fail                    ends this process with an error, for threads other than the main thread
    keep                    stores a preliminary result with the caller of `run_ranks`, used if the rank returns none

    Raises `UsageError` for numbers that contradict each other.
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


def whole_numbers(environment: Mapping[str, str], names: Sequence[str]) -> list[int]:
    """Return the values of these variables as integers. Raises `UsageError` for one that is not an integer."""
    numbers: list[int] = []
    for name in names:
        try:
            numbers.append(int(environment[name]))
        except ValueError:
            raise UsageError(f"{name}={environment[name]} in the environment: it must be a whole number") from None
    return numbers


def whole_number(environment: Mapping[str, str], name: str, default: str) -> int:
    """Return the value of one variable as an integer. Raises `UsageError`."""
    return whole_numbers({name: default, **environment}, (name,))[0]


def rank_info_of_user(environment: Mapping[str, str]) -> RankInfo | None:
    """Return the rank according to `USER_VARIABLES`; None if one of the six is missing.

    It also reads torchrun's restart count, and whether torchrun's agent has the store open.
    """
    if not all(environment.get(name) for name in USER_VARIABLES):
        return None
    rank, local_rank, size, local_size = whole_numbers(environment, USER_VARIABLES[:4])
    port, restart_count = whole_numbers(
        {"TORCHELASTIC_RESTART_COUNT": "0", **environment}, ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    )
    is_agent_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankInfo(
        rank=rank,
        local_rank=local_rank,
        size=size,
        local_size=local_size,
        started_by="env",
        rendezvous_url=f"tcp://{environment['MASTER_ADDR']}:{port}",
        is_store_master=rank == 0 and not is_agent_store,
        restart_count=restart_count,
        store_round=restart_count if is_agent_store else 0,
    )


def rank_info_of_one_host(environment: Mapping[str, str]) -> RankInfo | None:
    """The rank according to RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT only, as torch's env:// reads them.

    These do not show which ranks share a host, so the result is None unless all ranks do (a loopback address, or one
    rank).
    """
    values = {name: environment.get(name, "") for name in USER_VARIABLES if not name.startswith("LOCAL_")}
    has_local = any(environment.get(name) for name in USER_VARIABLES if name.startswith("LOCAL_"))
    if has_local or not all(values.values()):
        return None
    host = values["MASTER_ADDR"]
    if not (is_loopback_host(host) or values["WORLD_SIZE"] == "1"):
        return None
    return rank_info_of_user({**environment, "LOCAL_RANK": values["RANK"], "LOCAL_WORLD_SIZE": values["WORLD_SIZE"]})


def is_loopback_host(host: str) -> bool:
    """Whether this MASTER_ADDR can only be reached on its own host. Looks up no name."""
    return host in ("localhost", "::1") or host.startswith("127.")


def rank_info_of_task(
    started_by: str,
    environment: Mapping[str, str],
    numbers: tuple[int, int, int, int],
    first_address: Callable[[], str] | None = None,
    default_port: int | None = None,
) -> RankInfo:
    """Return the rank of a task whose launcher does not set the address of the rendezvous.

    numbers         rank, local rank, world size, local world size
    first_address   returns the address of the first host, if MASTER_ADDR is not set
    default_port    used if MASTER_PORT is not set
    """
    rank, local_rank, size, local_size = numbers
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT") or default_port
    if local_size == size and not (address and port):
        # The ranks meet in a file, so no port is opened.
        path = _private_file(environment, is_named=first_address is not None)
        return RankInfo(rank, local_rank, size, local_size, started_by, path.as_uri())
    if first_address is not None:
        address = address or first_address()
    rendezvous = f"tcp://{address}:{port}" if address and port else ""
    return RankInfo(rank, local_rank, size, local_size, started_by, rendezvous, is_store_master=rank == 0)


def _private_file(environment: Mapping[str, str], is_named: bool) -> Path:
    """Return a file named after the start of the ranks on this host, in a folder that only this user can open.

    is_named   whether variables of Slurm name this start. MPICH does not name a start, so its process does, also in a
               Slurm job, where two of them may run in one step
    """
    folder = Path(tempfile.gettempdir()) / f"everyrank-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:  # a file of that name, or a folder without write permission
        raise UsageError(f"{folder}: {error.strerror}; set TMPDIR to a folder that you own") from error
    is_symlink = folder.is_symlink()
    if is_symlink or folder.stat().st_uid != os.getuid():
        problem = "a symlink" if is_symlink else "a folder of another user"
        raise UsageError(f"{folder}: this is {problem}; set TMPDIR to a folder of your own")
    start = [environment.get(name, "") for name in START_VARIABLES]
    if not is_named and not environment.get("PMIX_NAMESPACE"):
        start = [launcher_process(environment)]
    return folder / re.sub(r"[^\w.-]", "_", "-".join(["meeting", *start]))


def launcher_process(environment: Mapping[str, str]) -> str:
    """Return id and start time of the launcher on this host: the nearest ancestor without the variables of ranks."""
    names = [name for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID") if name in environment]
    with contextlib.suppress(psutil.Error, OSError):
        for process in psutil.Process().parents():
            variables: dict[str, str] = {}
            with contextlib.suppress(psutil.AccessDenied):  # a process of a different user is no rank
                variables = process.environ()
            if not names or not all(name in variables for name in names):
                return f"{process.pid} {start_time(process.pid)}"
    return ""
