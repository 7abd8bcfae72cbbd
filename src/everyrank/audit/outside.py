"""Started by somebody else's launcher (torchrun, srun, mpirun, a person): each rank runs its own script.

They share a folder on this host; rank 0 waits until all have ended, and judges.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from everyrank.audit.start import ScriptRun
from everyrank.errors import CannotRunError, RankFailedError
from everyrank.launch.environments import rank_info_from_environment
from everyrank.launch.host_info import start_time
from everyrank.launch.rank_info import RankInfo
from everyrank.launch.supervisor import write_whole

__all__ = ["rank_from_outside", "remove_shared_folder", "shared_folder", "together"]

_WAIT_SECONDS = 120.0  # for the others: for rank 0 at the start, for all when this rank's script has ended
_OF_ONE_START = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    *("HOROVOD_GLOO_RENDEZVOUS_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE"),
)
"""What a launcher, or a person, tells all ranks of one start alike."""


def rank_from_outside(environment: Mapping[str, str]) -> RankInfo | None:
    """Where a launcher, or a person, has put this process; None where nobody has, or it is alone."""
    if "RANK" in environment:
        rank, size = int(environment["RANK"]), int(environment.get("WORLD_SIZE", "1"))
        local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
        return RankInfo(rank, rank % local_size, size, local_size, "env", "") if size > 1 else None
    info = rank_info_from_environment({name: value for name, value in environment.items() if name != "WORLD_SIZE"})
    return info if info is not None and info.size > 1 else None


def shared_folder(info: RankInfo, environment: Mapping[str, str], words: Sequence[str] = ()) -> Path:
    """The folder of all ranks of this start, which rank 0 makes.

    words  the script and its arguments: ranks typed in several terminals have those in common, not a parent

    Raises `CannotRunError` where they are on several hosts, where somebody else has made the folder, and where rank 0
    does not come.
    """
    if info.local_size != info.size:
        raise CannotRunError("audit from outside looks at the ranks of one host: start all of them on one")
    base = Path(tempfile.gettempdir()) / f"everyrank-audit-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        base.mkdir(mode=0o700)
    about = base.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise CannotRunError(f"{base}: others can write there, or it is a link; remove it, or set TMPDIR to a folder")
    shared = [environment.get(name, "") for name in _OF_ONE_START]
    key = hashlib.sha256("\0".join([*shared, str(info.size), str(Path.cwd()), *words[:1]]).encode()).hexdigest()[:16]
    return _made_by_rank_0(base, key) if info.rank == 0 else _waited_for(base, key)


def _made_by_rank_0(base: Path, key: str) -> Path:
    """A new folder, and beside it a file that says where it is, and by whose process it lives."""
    if _living(base / f"{key}.json") is not None:
        raise CannotRunError("another audit of this script runs here as rank 0; give this one a MASTER_PORT of its own")
    folder = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=base))
    row = {"folder": folder.name, "pid": os.getpid(), "began": start_time(os.getpid())}
    write_whole(base / f"{key}.json", json.dumps(row).encode())
    return folder


def _waited_for(base: Path, key: str) -> Path:
    """The folder that rank 0 has made, when it has; what an earlier audit left is not taken for it."""
    begin = time.monotonic()
    while (folder := _living(base / f"{key}.json")) is None:
        if time.monotonic() > begin + _WAIT_SECONDS:
            raise CannotRunError(f"rank 0 has not come within {_WAIT_SECONDS:g} s: start it in this folder, too")
        time.sleep(0.1)
    return folder


def _living(place: Path) -> Path | None:
    """The folder of an audit whose rank 0 is alive."""
    with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
        row = json.loads(place.read_text())
        folder = place.parent / Path(row["folder"]).name
        if start_time(row["pid"]) == row["began"] and folder.is_dir():
            return folder
    return None


def remove_shared_folder(folder: Path) -> None:
    """What rank 0 has made."""
    (folder.parent / f"{folder.name.partition('-')[0]}.json").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # other audits of this user have folders there
        folder.parent.rmdir()


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
