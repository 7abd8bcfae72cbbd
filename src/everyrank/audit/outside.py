"""The audit in ranks that an external launcher (torchrun, srun, mpirun) or the user has started.

Each rank runs its own script, and all share a folder on this host. Rank 0 waits until all have ended, and judges.
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

_WAIT_SECONDS = 120.0  # for rank 0 at the start, and for the other ranks at the end
_OF_ONE_START = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    *("HOROVOD_GLOO_RENDEZVOUS_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE"),
)
"""Variables that have the same value on all ranks of a start."""


def rank_from_outside(environment: Mapping[str, str]) -> RankInfo | None:
    """The rank of this process, if an external launcher or the user has started several; else None."""
    if "RANK" in environment:
        rank, size = int(environment["RANK"]), int(environment.get("WORLD_SIZE", "1"))
        local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
        return RankInfo(rank, rank % local_size, size, local_size, "env", "") if size > 1 else None
    info = rank_info_from_environment({name: value for name, value in environment.items() if name != "WORLD_SIZE"})
    return info if info is not None and info.size > 1 else None


def shared_folder(info: RankInfo, environment: Mapping[str, str], words: Sequence[str] = ()) -> Path:
    """The folder that all ranks of this start share, and rank 0 creates.

    words  the script and its arguments: ranks typed in several terminals share them, and no parent process

    Raises `CannotRunError` if the ranks are on several hosts, if a different user owns the folder, and if rank 0 does
    not start.
    """
    if info.local_size != info.size:
        raise CannotRunError(
            "an audit of ranks that are already started works on one host only; start all ranks on one host"
        )
    base = Path(tempfile.gettempdir()) / f"everyrank-audit-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        base.mkdir(mode=0o700)
    status = base.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CannotRunError(f"{base}: other users can write there, or it is a link; remove it, or set TMPDIR")
    shared = [environment.get(name, "") for name in _OF_ONE_START]
    key = hashlib.sha256("\0".join([*shared, str(info.size), str(Path.cwd()), *words[:1]]).encode()).hexdigest()[:16]
    return _create_folder(base, key) if info.rank == 0 else _wait_for_folder(base, key)


def _create_folder(base: Path, key: str) -> Path:
    """A new folder. A file next to it has its name and the process that owns it."""
    if _living(base / f"{key}.json") is not None:
        raise CannotRunError("another audit of this script runs here as rank 0; give this one a different MASTER_PORT")
    folder = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=base))
    row = {"folder": folder.name, "pid": os.getpid(), "began": start_time(os.getpid())}
    write_whole(base / f"{key}.json", json.dumps(row).encode())
    return folder


def _wait_for_folder(base: Path, key: str) -> Path:
    """The folder that rank 0 creates. One that an earlier audit has left is ignored."""
    start = time.monotonic()
    while (folder := _living(base / f"{key}.json")) is None:
        if time.monotonic() > start + _WAIT_SECONDS:
            raise CannotRunError(f"rank 0 did not start within {_WAIT_SECONDS:g} s; start it in the same folder")
        time.sleep(0.1)
    return folder


def _living(path: Path) -> Path | None:
    """The folder of an audit whose rank 0 is alive."""
    with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
        row = json.loads(path.read_text())
        folder = path.parent / Path(row["folder"]).name
        if start_time(row["pid"]) == row["began"] and folder.is_dir():
            return folder
    return None


def remove_shared_folder(folder: Path) -> None:
    """Remove what rank 0 has created."""
    (folder.parent / f"{folder.name.partition('-')[0]}.json").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # other audits of this user have folders there
        folder.parent.rmdir()


def together(run: ScriptRun, info: RankInfo) -> ScriptRun | None:
    """Record how this rank's script ended. On rank 0 return how all have ended, on other ranks None.

    Raises `RankFailedError` if a rank does not end.
    """
    ended = {"status": run.status, "code": run.codes[0], "output": run.outputs[0]}
    write_whole(run.folder / f"ended{info.rank}.json", json.dumps(ended).encode())
    if info.rank != 0:
        return None
    paths = [run.folder / f"ended{rank}.json" for rank in range(info.size)]
    start = time.monotonic()
    while missing := [rank for rank, path in enumerate(paths) if not path.exists()]:
        if time.monotonic() > start + _WAIT_SECONDS:
            raise RankFailedError(f"rank {', '.join(map(str, missing))} has not ended {_WAIT_SECONDS:g} s after rank 0")
        time.sleep(0.1)
    rows = [json.loads(path.read_text()) for path in paths]
    statuses = [row["status"] for row in rows]
    worst = next((status for status in ("hangs", "failed", "long") if status in statuses), "finished")
    outputs = tuple(row["output"] for row in rows)
    return ScriptRun(run.folder, info.size, worst, tuple(row["code"] for row in rows), outputs, run.seconds)
