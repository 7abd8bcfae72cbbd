"""Started by somebody else's launcher, `torchrun ... -m everyrank audit train.py`: each rank runs its own script.

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
from everyrank.launch.supervisor import write_whole

__all__ = ["is_rank", "shared_folder", "together"]

_WAIT_SECONDS = 120.0  # for the others, when this rank's script has ended


def is_rank(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as one of several."""
    return "RANK" in environment and int(environment.get("WORLD_SIZE", "1")) > 1


def shared_folder(environment: Mapping[str, str]) -> Path:
    """The folder of all ranks of this start. Raises `CannotRunError` where they are on several hosts."""
    if environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"]) != environment["WORLD_SIZE"]:
        raise CannotRunError("audit from outside looks at the ranks of one host: start torchrun with --nnodes 1")
    words = [str(os.getuid()), environment.get("TORCHELASTIC_RUN_ID", ""), environment.get("MASTER_PORT", "")]
    name = re.sub(r"\W", "_", "-".join(["everyrank-audit", *words, str(os.getppid())]))
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise CannotRunError(f"{folder}: it is another user's; set TMPDIR to a folder of your own")
    return folder


def together(run: ScriptRun, environment: Mapping[str, str]) -> ScriptRun | None:
    """Write down how this rank's script ended; on rank 0 how all did, elsewhere None.

    Raises `RankFailedError` for ranks that do not come.
    """
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    ended = {"status": run.status, "code": run.codes[0], "output": run.outputs[0]}
    write_whole(run.folder / f"ended{rank}.json", json.dumps(ended).encode())
    if rank != 0:
        return None
    places = [run.folder / f"ended{other}.json" for other in range(size)]
    begin = time.monotonic()
    while missing := [other for other, place in enumerate(places) if not place.exists()]:
        if time.monotonic() > begin + _WAIT_SECONDS:
            raise RankFailedError(f"rank {', '.join(map(str, missing))} has not ended {_WAIT_SECONDS:g} s after rank 0")
        time.sleep(0.1)
    rows = [json.loads(place.read_text()) for place in places]
    statuses = [row["status"] for row in rows]
    worst = next((status for status in ("hangs", "failed", "long") if status in statuses), "finished")
    outputs = tuple(row["output"] for row in rows)
    return ScriptRun(run.folder, size, worst, tuple(row["code"] for row in rows), outputs, run.seconds)
