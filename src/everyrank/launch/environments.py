"""Who started us? The environment of each launcher, read as one full set, never mixed.

Launchers are nested: torchrun inside srun inside sbatch. The innermost one started this process, so it is asked first:

    1  torchrun   TORCHELASTIC_RUN_ID beside the six of a person
    2  a person   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    3  horovodrun HOROVOD_RANK, HOROVOD_SIZE, HOROVOD_LOCAL_RANK, HOROVOD_LOCAL_SIZE
    4  mpirun     OMPI_COMM_WORLD_RANK ... (Open MPI), PMI_RANK and MPI_LOCALRANKID ... (MPICH, Intel MPI)
    5  srun       SLURM_PROCID ... and SLURM_STEP_ID, which a batch script has not: there we are no rank

Nobody's full set, but RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torch's own env:// takes them, start a rank
where all ranks are on this host.

A variable of a person beside a full set of horovodrun, mpirun or srun has to say the same, or it is an error. Each
launcher's own variables are read in its file.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping

import psutil

from everyrank.errors import UsageError
from everyrank.launch.launcher import Environment, find_launcher, launchers
from everyrank.launch.rank_info import RankInfo
from everyrank.launch.variables import PERSON, rank_info_of_one_host, rank_info_of_person

__all__ = ["environment_of", "is_rank_0_of_all", "rank_info_from_environment", "threads_asked"]

_DEPTH_OF_PERSON = 4


def rank_info_from_environment(environment: Mapping[str, str]) -> RankInfo | None:
    """The place that a launcher, or a person, put into the environment; None where nobody started us as a rank.

    Raises `UsageError` for an incomplete set, and for sets that contradict each other.
    """
    known = _environments()
    readers = [(own.depth, own.read) for own in known] + [(_DEPTH_OF_PERSON, rank_info_of_person)]
    for depth, read in sorted(readers, key=lambda row: row[0], reverse=True):
        info = read(environment)
        if info is None:
            continue
        if depth < _DEPTH_OF_PERSON:
            _check_agreement(environment, info)
        inner = find_launcher(info.started_by)
        if inner is not None:
            for outer in known:
                if outer.depth < depth:
                    outer.check_nested(environment, inner)
        return dataclasses.replace(info, threads=threads_asked(environment))
    info = rank_info_of_one_host(environment)
    if info is not None:
        return dataclasses.replace(info, threads=threads_asked(environment))
    _check_complete(environment, known)
    return None


def _environments() -> list[Environment]:
    return [row.environment for row in launchers() if row.environment is not None]


def _check_complete(environment: Mapping[str, str], known: list[Environment]) -> None:
    """Raises `UsageError` where some of a set say which rank this is, and the rest is not there."""
    program = "torchrun"
    present = [name for name in PERSON if environment.get(name)]
    missing = [name for name in PERSON if name not in present]
    if "RANK" not in present and "WORLD_SIZE" not in present:
        for own in known:
            program, (present, missing) = own.program, own.missing(environment)
            if present:
                break
        else:
            return
    fix = f"start with {program}, or unset {present[0]}"
    if missing == ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]:
        fix = f"which ranks share a host is not known then; set both (0 and 1 with one rank a host), or {fix}"
    shown = [name if environment[name].isdecimal() else f"{name}={environment[name]}" for name in present]
    raise UsageError(f"the environment has {', '.join(shown)} but not {', '.join(missing)}: {fix}")


def _check_agreement(environment: Mapping[str, str], info: RankInfo) -> None:
    """A variable that a person left beside a launcher's full set. Raises `UsageError` where the two disagree."""
    own = {
        "RANK": info.rank,
        "WORLD_SIZE": info.size,
        "LOCAL_RANK": info.local_rank,
        "LOCAL_WORLD_SIZE": info.local_size,
    }
    outer = environment_of(info)
    program = outer.program if outer is not None else info.started_by
    for name, value in own.items():
        text = environment.get(name)
        if text and text != str(value):
            fix = f"start {text} tasks (--ntasks={text}), or unset {name}" if name == "WORLD_SIZE" else f"unset {name}"
            raise UsageError(
                f"{name}={text} in the environment, but {program} says {value} (of {info.size} ranks): {fix}"
            )


def is_rank_0_of_all(environment: Mapping[str, str]) -> bool:
    """Whether this process is no rank of a launcher outside, or its rank 0, whatever else its variables say.

    A variable that is no number, left in a shell of an allocation, makes no rank: somebody has to say so.
    """
    # a person may have started this one alone: their RANK counts beside the marker of a launcher only
    return all(
        environment.get(name, "0") == "0" or not environment[name].isdecimal()
        for own in _environments()
        if own.marker is None or own.marker in environment
        for name in own.rank_variables
    )


def environment_of(info: RankInfo) -> Environment | None:
    """What is known of the variables of whatever has started this rank; None where that was a person."""
    row = find_launcher(info.started_by)
    return row.environment if row is not None else None


def threads_asked(environment: Mapping[str, str]) -> int | None:
    """CPU threads of each process that a person has asked for; None where nobody has.

    torchrun itself sets OMP_NUM_THREADS=1 for several ranks, where nobody has set it: then what counts is the
    environment that torchrun was started in.
    """
    found = _threads_in(environment)
    markers = [own.marker for own in _environments() if own.sets_threads and own.marker is not None]
    marker = next((marker for marker in markers if marker in environment), None)
    return _threads_in(_environment_before(marker)) if found == 1 and marker is not None else found


def _threads_in(environment: Mapping[str, str]) -> int | None:
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):  # torch, too, takes the first of these that is set
        first = environment.get(name, "").split(",")[0].strip()  # OpenMP takes a number for each level of nesting
        if first.isdecimal() and 0 < len(first) < 10 and int(first) > 0:
            return int(first)
    return None


def _environment_before(marker: str) -> Mapping[str, str]:
    """The environment of the process that started the launcher; nothing where it cannot be read."""
    with contextlib.suppress(psutil.Error, OSError):
        for process in psutil.Process().parents():
            own = process.environ()
            if marker not in own:
                return own
    return {}
