"""Started by somebody else's launcher (torchrun, srun, mpirun, a person): each rank runs its own script.

They share a folder on this host; rank 0 waits until all have ended, and judges.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from everyrank.audit.start import ScriptRun
from everyrank.errors import CannotRunError, RankFailedError
from everyrank.launch.environments import rank_info_from_environment
from everyrank.launch.rank_info import RankInfo
from everyrank.launch.supervisor import write_whole

__all__ = ["rank_from_outside", "shared_folder", "together"]

_WAIT_SECONDS = 120.0  # for the others, when this rank's script has ended


def rank_from_outside(environment: Mapping[str, str]) -> RankInfo | None:
    """Where a launcher, or a person, has put this process; None where nobody has, or it is alone."""
    if "RANK" in environment:
        rank, size = int(environment["RANK"]), int(environment.get("WORLD_SIZE", "1"))
        local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
        return RankInfo(rank, rank % local_size, size, local_size, "env", "") if size > 1 else None
    info = rank_info_from_environment({name: value for name, value in environment.items() if name != "WORLD_SIZE"})
    return info if info is not None and info.size > 1 else None


def shared_folder(info: RankInfo, environment: Mapping[str, str]) -> Path:
    """The folder of all ranks of this start. Raises `CannotRunError` where they are on several hosts."""
    if info.local_size != info.size:
        raise CannotRunError("audit from outside looks at the ranks of one host: start all of them on one")
    names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    # under horovodrun each rank has a parent of its own, and all the port of its server
    start = environment.get("HOROVOD_GLOO_RENDEZVOUS_PORT") or str(os.getppid())
    words = [str(os.getuid()), *(environment.get(name, "") for name in names), start]
    name = re.sub(r"\W", "_", "-".join(["everyrank-audit", *words]))
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise CannotRunError(f"{folder}: it is another user's; set TMPDIR to a folder of your own")
    return folder


def together(run: ScriptRun, info: RankInfo) -> ScriptRun | None:
    """Write down how this rank's script ended; on rank 0 how all did, elsewhere None.

    Raises `RankFailedError` for ranks that do not come.
    """
    ended = {"status": run.status, "code": run.codes[0], "output": run.outputs[0]}
    write_whole(run.folder / f"ended{info.rank}.json", json.dumps(ended).encode())
    if info.rank != 0:
        return None
    places = [run.folder / f"ended{other}.json" for other in range(info.size)]
    begin = time.monotonic()
    while missing := [other for other, path in enumerate(places) if not path.exists()]:
        if time.monotonic() > begin + _WAIT_SECONDS:
            raise RankFailedError(f"rank {', '.join(map(str, missing))} has not ended {_WAIT_SECONDS:g} s after rank 0")
        time.sleep(0.1)
    rows = [json.loads(path.read_text()) for path in places]
    statuses = [row["status"] for row in rows]
    worst = next((status for status in ("hangs", "failed", "long") if status in statuses), "finished")
    outputs = tuple(row["output"] for row in rows)
    return ScriptRun(run.folder, info.size, worst, tuple(row["code"] for row in rows), outputs, run.seconds)
