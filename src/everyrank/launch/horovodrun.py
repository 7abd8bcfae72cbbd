"""horovodrun: Horovod's own launcher starts the ranks, on other hosts by ssh, and tells each of them its place."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from everyrank.errors import CannotRunError, UsageError
from everyrank.launch.job import WORKER, Launch
from everyrank.launch.launcher import Environment, Launcher
from everyrank.launch.rank_info import RankInfo
from everyrank.launch.variables import rank_info_of_task, whole_numbers

__all__ = ["LAUNCHER", "find", "find_horovodrun", "render"]

# rank, local rank, world size, local world size
_PLACE = ("HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE")
_SERVER = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")


def render(launch: Launch, directory: Path) -> list[list[str]]:
    """One argv. Which hosts there are is in its own words: --launcher-args '-H n0:2,n1:2'."""
    command = [find_horovodrun() or "horovodrun", "-np", str(launch.processes), "--gloo"]
    return [[*command, *launch.arguments, *WORKER, str(directory)]]


def find_horovodrun() -> str | None:
    """horovodrun: that of this Python's own environment, else the first on PATH; None where there is none."""
    return shutil.which("horovodrun", path=str(Path(sys.executable).parent)) or shutil.which("horovodrun")


def find() -> str:
    """The path of horovodrun. Raises `CannotRunError` where there is none."""
    path = find_horovodrun()
    if path is None:
        raise CannotRunError(
            "--launcher horovodrun: there is no horovodrun here; build Horovod 0.28.1: docs/horovod.md"
        )
    return path


def _check(launch: Launch) -> None:
    if launch.nodes > 1 and not any(word in ("-H", "--hosts", "-hostfile", "--hostfile") for word in launch.arguments):
        raise UsageError(
            f"--nodes {launch.nodes}: horovodrun reaches hosts that it is told: --launcher-args '-H n0:2,n1:2'"
        )


def _read(environment: Mapping[str, str]) -> RankInfo | None:
    """Its ranks meet by way of the server that horovodrun keeps open for them, unless somebody names a place."""
    if not all(environment.get(name) for name in _PLACE):
        return None
    if environment.get("HOROVOD_ELASTIC") == "1":
        raise UsageError(
            "HOROVOD_ELASTIC=1: the number of ranks may not change here; horovodrun -np N, without --min-np"
        )
    rank, local_rank, size, local_size = whole_numbers(environment, _PLACE)
    place = (rank, local_rank, size, local_size)
    if environment.get("MASTER_ADDR") or not all(environment.get(name) for name in _SERVER):
        return rank_info_of_task("horovodrun", environment, place)
    address, port = (environment[name] for name in _SERVER)
    return RankInfo(rank, local_rank, size, local_size, "horovodrun", f"http://{address}:{port}")


def _missing(environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    present = [name for name in _PLACE if environment.get(name)]
    if _PLACE[0] in present and len(present) < len(_PLACE):
        return present, [name for name in _PLACE if name not in present]
    return [], []


LAUNCHER = Launcher(
    name="horovodrun",
    render=render,
    find=find,
    check=_check,
    reads_job_folder=True,
    needs_sigterm=True,
    terminates_ranks=True,
    output_mark=rb"\[0\]<stdout>:",
    environment=Environment(
        program="horovodrun",
        depth=3,
        rank_variables=_PLACE[:1],
        read=_read,
        missing=_missing,
    ),
)
