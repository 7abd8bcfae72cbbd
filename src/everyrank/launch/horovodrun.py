"""horovodrun: Horovod's own launcher starts the ranks, on other hosts by ssh, and numbers them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from everyrank.errors import CannotRunError, UsageError
from everyrank.launch.job import WORKER, Launch
from everyrank.launch.launcher import Launcher
from everyrank.launch.rank_info import RankInfo, whole_numbers

__all__ = ["LAUNCHER", "find_horovodrun"]

_RENDEZVOUS_SERVER = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
_HOST_FLAGS = ("-H", "--hosts", "-hostfile", "--hostfile")


class Horovodrun(Launcher):
    """One horovodrun for all ranks of all hosts."""

    name = "horovodrun"
    program = "horovodrun"
    starts_horovod = True
    accepts_arguments = True
    supports_nodes = True
    needs_shared_folder = True
    graceful_shutdown = True
    terminates_on_failure = True
    line_prefix = rb"\[0\]<stdout>:"
    nesting_level = 3
    rank_variables = (("HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"),)

    def commands(self, launch: Launch, job_folder: Path) -> list[list[str]]:
        """Return one horovodrun. Give the hosts as arguments of horovodrun: --launcher-args '-H n0:2,n1:2'."""
        command = [find_horovodrun() or "horovodrun", "-np", str(launch.processes), "--gloo"]
        return [[*command, *launch.arguments, *WORKER, str(job_folder)]]

    def find(self) -> str:
        """Return the path of horovodrun."""
        path = find_horovodrun()
        if path is None:
            raise CannotRunError(
                "--launcher horovodrun: horovodrun was not found; build Horovod 0.28.1: docs/horovod.md"
            )
        return path

    def check(self, launch: Launch) -> None:
        """Raise `UsageError` for several nodes without a list of hosts."""
        if launch.nodes > 1 and not set(_HOST_FLAGS) & set(launch.arguments):
            raise UsageError(
                f"--nodes {launch.nodes}: horovodrun needs the list of hosts; add --launcher-args '-H n0:2,n1:2'"
            )

    def rank_info(self, environment: Mapping[str, str]) -> RankInfo | None:
        """Return the rank. Ranks meet at the HTTP server of horovodrun, unless the user has set MASTER_ADDR."""
        [names] = self.rank_variables
        is_complete = all(environment.get(name) for name in names)
        if is_complete and environment.get("HOROVOD_ELASTIC") == "1":
            raise UsageError(
                "HOROVOD_ELASTIC=1: everyrank does not support a changing number of ranks under Horovod; "
                "use horovodrun -np N, without --min-np"
            )
        has_server = all(environment.get(name) for name in _RENDEZVOUS_SERVER)
        if not is_complete or environment.get("MASTER_ADDR") or not has_server:
            return super().rank_info(environment)
        rank, local_rank, size, local_size = whole_numbers(environment, names)
        address, port = (environment[name] for name in _RENDEZVOUS_SERVER)
        return RankInfo(rank, local_rank, size, local_size, self.name, f"http://{address}:{port}")


def find_horovodrun() -> str | None:
    """Return the path of horovodrun: next to this Python, else on PATH; None if there is none."""
    return shutil.which("horovodrun", path=str(Path(sys.executable).parent)) or shutil.which("horovodrun")


LAUNCHER = Horovodrun()
