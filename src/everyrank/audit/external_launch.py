"""Audits ranks that an external launcher (torchrun, srun, mpirun) or the user has started.

Each rank runs the script in its own process, and all ranks share a folder on this host. Rank 0 waits until all ranks
have ended, then applies the rules to what they recorded.
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
from everyrank.launch.rank_info import RankInfo, whole_number
from everyrank.launch.supervisor import write_whole

__all__ = ["external_rank", "gather_runs", "remove_shared_folder", "shared_folder"]

_WAIT_SECONDS = 120.0  # for rank 0 to start, and for the other ranks to end
_LAUNCH_VARIABLES = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    *("HOROVOD_GLOO_RENDEZVOUS_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE"),
)
"""Variables that have the same value on all ranks of one launch."""


def external_rank(environment: Mapping[str, str]) -> RankInfo | None:
    """Return the rank of this process if a launcher or the user has started several ranks, otherwise None."""
    if environment.get("RANK"):
        rank, size = whole_number(environment, "RANK", "0"), whole_number(environment, "WORLD_SIZE", "1")
        local_size = whole_number(environment, "LOCAL_WORLD_SIZE", str(size))
        return RankInfo(rank, rank % max(local_size, 1), size, local_size, "env", "") if size > 1 else None
    # WORLD_SIZE without RANK would be an error here, but a script that starts its own ranks may set it
    info = rank_info_from_environment({name: value for name, value in environment.items() if name != "WORLD_SIZE"})
    return info if info is not None and info.size > 1 else None


def shared_folder(info: RankInfo, environment: Mapping[str, str], python_args: Sequence[str] = ()) -> Path:
    """Return the folder that all ranks of this launch share. Rank 0 creates it.

    python_args  the script and its arguments, or -m, a module and its arguments. The script or module is part of the
                 hash in the folder's name. Ranks that you start in several terminals may have no launcher variables.
                 Without the script, audits of two scripts in one directory would then have the same folder

    Raises `CannotRunError` if the ranks are on several hosts, if another user can write to the folder, if rank 0
    does not start, or if an earlier audit of this script is still running.
    """
    if info.local_size != info.size:
        raise CannotRunError(
            "the ranks run on several hosts, and audit works only on one host. Start all ranks on one host"
        )
    base = Path(tempfile.gettempdir()) / f"everyrank-audit-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        base.mkdir(mode=0o700)
    folder_status = base.lstat()
    if not stat.S_ISDIR(folder_status.st_mode) or folder_status.st_uid != os.getuid() or folder_status.st_mode & 0o022:
        raise CannotRunError(f"{base}: other users can write there, or it is a symbolic link. Remove it, or set TMPDIR")
    launch_values = [environment.get(name, "") for name in _LAUNCH_VARIABLES]
    script = python_args[: 2 if python_args[:1] == ["-m"] else 1]
    launch = "\0".join([*launch_values, str(info.size), str(Path.cwd()), *script])
    key = hashlib.sha256(launch.encode()).hexdigest()[:16]
    return _create_folder(base, key) if info.rank == 0 else _wait_for_folder(base, key)


def _create_folder(base: Path, key: str) -> Path:
    """Create the shared folder, and `{key}.json` next to it with its name and the process id of rank 0."""
    if _live_folder(base / f"{key}.json") is not None:
        raise CannotRunError(
            "rank 0 of another audit of this script is still running on this host. Give this audit a different port, "
            "for example MASTER_PORT=29501"
        )
    folder = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=base))
    owner = {"folder": folder.name, "pid": os.getpid(), "began": start_time(os.getpid())}
    write_whole(base / f"{key}.json", json.dumps(owner).encode())
    return folder


def _wait_for_folder(base: Path, key: str) -> Path:
    """Wait for the folder that rank 0 creates, and return it. A folder whose rank 0 has ended is ignored."""
    start = time.monotonic()
    while (folder := _live_folder(base / f"{key}.json")) is None:
        if time.monotonic() > start + _WAIT_SECONDS:
            raise CannotRunError(
                f"rank 0 did not start within {_WAIT_SECONDS:g} s. Start all ranks in the same working directory; this "
                f"rank is in {Path.cwd()}"
            )
        time.sleep(0.1)
    return folder


def _live_folder(owner_path: Path) -> Path | None:
    """Return the folder of an audit if its rank 0 is alive, otherwise None."""
    with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
        owner = json.loads(owner_path.read_text())
        folder = owner_path.parent / Path(owner["folder"]).name
        if start_time(owner["pid"]) == owner["began"] and folder.is_dir():
            return folder
    return None


def remove_shared_folder(folder: Path) -> None:
    """Remove the shared folder and the file next to it. Call it on rank 0."""
    (folder.parent / f"{folder.name.partition('-')[0]}.json").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # fails while other audits of this user have folders there
        folder.parent.rmdir()


def gather_runs(run: ScriptRun, info: RankInfo) -> ScriptRun | None:
    """Record how the script of this rank ended.

    On rank 0, return how the scripts of all ranks ended. On other ranks, return None.

    Raises `RankFailedError` if a rank does not end.
    """
    result = {"status": run.status, "code": run.codes[0], "output": run.outputs[0]}
    write_whole(run.folder / f"ended{info.rank}.json", json.dumps(result).encode())
    if info.rank != 0:
        return None
    result_paths = [run.folder / f"ended{rank}.json" for rank in range(info.size)]
    start = time.monotonic()
    while missing_ranks := [rank for rank, path in enumerate(result_paths) if not path.exists()]:
        if time.monotonic() > start + _WAIT_SECONDS:
            raise RankFailedError(
                f"rank {', '.join(map(str, missing_ranks))} did not end within {_WAIT_SECONDS:g} s after rank 0. "
                "Stop all ranks, and start them again"
            )
        time.sleep(0.1)
    results = [json.loads(path.read_text()) for path in result_paths]
    statuses = [result["status"] for result in results]
    worst_status = next((status for status in ("hangs", "failed", "timed_out") if status in statuses), "finished")
    outputs = tuple(result["output"] for result in results)
    return ScriptRun(
        run.folder, info.size, worst_status, tuple(result["code"] for result in results), outputs, run.seconds
    )
