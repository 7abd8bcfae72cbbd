"""Reading the place of a process out of environment variables: what the files of several launchers share."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from everyrank.errors import UsageError
from everyrank.launch.hosts import start_time
from everyrank.launch.rank_info import RankInfo

__all__ = [
    "PERSON",
    "rank_info_of_one_host",
    "rank_info_of_person",
    "rank_info_of_task",
    "whole_number",
    "whole_numbers",
]

PERSON = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def whole_numbers(environment: Mapping[str, str], names: Sequence[str]) -> list[int]:
    """These variables as whole numbers. Raises `UsageError` for one that is none."""
    found: list[int] = []
    for name in names:
        try:
            found.append(int(environment[name]))
        except ValueError:
            raise UsageError(f"{name}={environment[name]} in the environment: it must be a whole number") from None
    return found


def whole_number(environment: Mapping[str, str], name: str, default: str) -> int:
    """A variable that counts something. Raises `UsageError`."""
    return whole_numbers({name: default, **environment}, (name,))[0]


def rank_info_of_person(environment: Mapping[str, str]) -> RankInfo | None:
    """The place that the six variables of `PERSON` give; None where one of them is missing.

    Whoever sets them may also set torchrun's count of restarts, and say that a store is open already.
    """
    if not all(environment.get(name) for name in PERSON):
        return None
    rank, local_rank, size, local_size = whole_numbers(environment, PERSON[:4])
    port, restart_count = whole_numbers(
        {"TORCHELASTIC_RESTART_COUNT": "0", **environment}, ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    )
    is_of_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankInfo(
        rank=rank,
        local_rank=local_rank,
        size=size,
        local_size=local_size,
        started_by="env",
        rendezvous_url=f"tcp://{environment['MASTER_ADDR']}:{port}",
        is_store_master=rank == 0 and not is_of_agent,
        restart_count=restart_count,
        store_round=restart_count if is_of_agent else 0,
    )


def rank_info_of_one_host(environment: Mapping[str, str]) -> RankInfo | None:
    """The place that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT alone give, as torch's own env:// reads them.

    They do not say which ranks share a host: None, but where all of them do (a loopback address, or one rank).
    """
    few = {name: environment.get(name, "") for name in PERSON if not name.startswith("LOCAL_")}
    if not all(few.values()) or any(environment.get(name) for name in PERSON if name.startswith("LOCAL_")):
        return None
    host = few["MASTER_ADDR"]
    if not (host in ("localhost", "::1") or host.startswith("127.") or few["WORLD_SIZE"] == "1"):
        return None
    return rank_info_of_person({**environment, "LOCAL_RANK": few["RANK"], "LOCAL_WORLD_SIZE": few["WORLD_SIZE"]})


def rank_info_of_task(
    started_by: str,
    environment: Mapping[str, str],
    place: tuple[int, int, int, int],
    first_address: Callable[[], str] | None = None,
    default_port: int | None = None,
) -> RankInfo:
    """The place of a task whose launcher says nothing, or not all, of where its ranks meet.

    place           rank, local rank, world size, local world size
    first_address   gives the address of the first host, where MASTER_ADDR does not
    default_port    where MASTER_PORT gives none
    """
    rank, local_rank, size, local_size = place
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if address is None and local_size == size:
        # over a file that only the ranks of this launcher know, so that no port is opened
        return RankInfo(rank, local_rank, size, local_size, started_by, _private_file().as_uri())
    if first_address is not None:
        address = address or first_address()
    if default_port is not None:
        port = port or str(default_port)
    rendezvous = f"tcp://{address}:{port}" if address and port else ""
    return RankInfo(rank, local_rank, size, local_size, started_by, rendezvous, is_store_master=rank == 0)


def _private_file() -> Path:
    """A file named after what started the ranks of this host, in a folder of this user alone."""
    folder = Path(tempfile.gettempdir()) / f"everyrank-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:  # a file by that name, or a place that cannot be written
        raise UsageError(f"{folder}: {error.strerror}; set TMPDIR to a folder of your own") from error
    if folder.stat().st_uid != os.getuid() or folder.is_symlink():
        raise UsageError(f"{folder}: it is somebody else's; set TMPDIR to a folder of your own")
    own = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    if "PMIX_NAMESPACE" in os.environ:
        own = [os.environ["PMIX_NAMESPACE"]]
    elif not own[0]:  # MPICH has no name for what it started: the process that did; between them no wrapper may stand
        own = [str(os.getppid()), f"{start_time(os.getppid()):.2f}"]
    return folder / re.sub(r"[^\w.-]", "_", "-".join(["meeting", *own]))
