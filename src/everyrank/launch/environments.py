"""Which launcher started this process, and as which rank? Reads the environment variables of each launcher.

Launchers are nested: torchrun inside srun inside sbatch. The innermost one started this process, so it is read first:

    1  torchrun     TORCHELASTIC_RUN_ID and the six variables of a user
    2  the user     RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    3  horovodrun   HOROVOD_RANK, HOROVOD_SIZE, HOROVOD_LOCAL_RANK, HOROVOD_LOCAL_SIZE
    4  mpirun       OMPI_COMM_WORLD_RANK ... (Open MPI), PMI_RANK and MPI_LOCALRANKID ... (MPICH, Intel MPI)
    5  srun         SLURM_PROCID ... and SLURM_STEP_ID; a batch script has no SLURM_STEP_ID and is not a rank

Variables of different launchers are never combined. If no set is complete, RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT are enough if all ranks are on this host, as for torch's env://.

A user's variable next to the complete set of horovodrun, mpirun or srun must have the same value; else it is an error.
Each launcher's file reads its own variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping

import psutil

from everyrank.errors import UsageError
from everyrank.launch.launcher import BatchLauncher, find_launcher, launchers
from everyrank.launch.rank_info import USER_VARIABLES, RankInfo, rank_info_of_one_host, rank_info_of_user

__all__ = ["is_rank_0_of_all", "rank_info_from_environment", "threads_asked"]

_NESTING_LEVEL_OF_USER = 4


def rank_info_from_environment(environment: Mapping[str, str]) -> RankInfo | None:
    """Return the rank of this process according to a launcher's or the user's variables; None if it is not a rank.

    Raises `UsageError` for an incomplete set, and for sets that contradict each other.
    """
    readers = [(launcher.nesting_level, launcher.rank_info) for launcher in launchers()]
    readers.append((_NESTING_LEVEL_OF_USER, rank_info_of_user))
    for level, read in sorted(readers, key=lambda row: row[0], reverse=True):
        info = read(environment)
        if info is None:
            continue
        if level < _NESTING_LEVEL_OF_USER:
            _check_agreement(environment, info)
        inner = find_launcher(info.started_by)
        if inner is not None:
            for outer in launchers():
                if isinstance(outer, BatchLauncher) and outer.nesting_level < level:
                    outer.check_nested(environment, inner)
        return dataclasses.replace(info, threads=threads_asked(environment))
    info = rank_info_of_one_host(environment)
    if info is not None:
        return dataclasses.replace(info, threads=threads_asked(environment))
    _check_complete(environment)
    return None


def _check_complete(environment: Mapping[str, str]) -> None:
    """Raise `UsageError` if the variable for the rank is set, but others of the same launcher are missing."""
    program, names = "torchrun", USER_VARIABLES
    if not environment.get("RANK") and not environment.get("WORLD_SIZE"):
        incomplete = [
            (launcher.program, names)
            for launcher in launchers()
            for names in launcher.rank_variables
            if environment.get(names[0]) and not all(environment.get(name) for name in names)
        ]
        if not incomplete:
            return
        program, names = incomplete[0]
    present = [name for name in names if environment.get(name)]
    missing = [name for name in names if name not in present]
    fix = f"start with {program}, or unset {present[0]}"
    if missing == ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]:
        fix = f"it is unknown which ranks share a host; set both (0 and 1 with one rank per host), or {fix}"
    present_texts = [name if environment[name].isdecimal() else f"{name}={environment[name]}" for name in present]
    raise UsageError(f"the environment has {', '.join(present_texts)} but not {', '.join(missing)}: {fix}")


def _check_agreement(environment: Mapping[str, str], info: RankInfo) -> None:
    """Raise `UsageError` if a user's variable contradicts the complete set of a launcher."""
    expected = {
        "RANK": info.rank,
        "WORLD_SIZE": info.size,
        "LOCAL_RANK": info.local_rank,
        "LOCAL_WORLD_SIZE": info.local_size,
    }
    launcher = find_launcher(info.started_by)
    program = launcher.program if launcher is not None else info.started_by
    for name, value in expected.items():
        text = environment.get(name)
        if text and text != str(value):
            fix = f"unset {name}"
            if name == "WORLD_SIZE":
                is_batch = isinstance(launcher, BatchLauncher)
                start = f"{text} tasks (--ntasks={text})" if is_batch else f"{text} ranks ({program} -np {text})"
                fix = f"start {start}, or {fix}"
            raise UsageError(
                f"{name}={text} in the environment, but {program} set {value} (of {info.size} ranks): {fix}"
            )


def is_rank_0_of_all(environment: Mapping[str, str]) -> bool:
    """Whether this process is rank 0 of an external launcher, or not a rank at all.

    Reads only few variables, because the others may be the error that rank 0 has to report. The innermost launcher
    counts, because torchrun may number the nodes differently from srun. If each torchrun started a job of its own, the
    launcher of the torchruns counts, too. A value that is not a number is ignored: a shell in an allocation may have
    one.
    """
    num_torchruns = environment.get("GROUP_WORLD_SIZE", "")
    is_one_job = num_torchruns.isdecimal() and int(num_torchruns) > 1
    for launcher in sorted(launchers(), key=lambda launcher: launcher.nesting_level, reverse=True):
        # A user may have started only this process, so their RANK counts only next to the marker of a launcher.
        if launcher.marker_variable is None or launcher.marker_variable in environment:
            ranks = [environment.get(names[0], "") for names in launcher.rank_variables]
            numbers = [int(rank) for rank in ranks if rank.isdecimal()]
            if numbers and (numbers[0] or is_one_job):
                return numbers[0] == 0
    return True


def threads_asked(environment: Mapping[str, str]) -> int | None:
    """CPU threads per process set by the user (OMP_NUM_THREADS); None if the user set none.

    torchrun sets OMP_NUM_THREADS=1 for several ranks if it is not set. Then the environment in which torchrun was
    started counts.
    """
    threads = _threads_in(environment)
    markers = [marker for launcher in launchers() if (marker := launcher.marker_variable) and marker in environment]
    return _threads_in(_environment_without(markers[0])) if threads == 1 and markers else threads


def _threads_in(environment: Mapping[str, str]) -> int | None:
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):  # torch also prefers the first
        outermost = environment.get(name, "").split(",")[0].strip()  # OpenMP has a number for each nesting level
        if outermost.isdecimal() and 0 < len(outermost) < 10 and int(outermost) > 0:
            return int(outermost)
    return None


def _environment_without(marker: str) -> Mapping[str, str]:
    """Return the environment of the nearest parent process without this variable; {} if it cannot be read."""
    with contextlib.suppress(psutil.Error, OSError):
        for process in psutil.Process().parents():
            environment = process.environ()
            if marker not in environment:
                return environment
    return {}
