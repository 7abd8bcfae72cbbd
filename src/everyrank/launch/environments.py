"""Who started us? The environment of each launcher, read as one full set, never mixed.

Launchers are nested: torchrun inside srun inside sbatch. The innermost one started this process, so it is asked first:

    1  torchrun   TORCHELASTIC_RUN_ID beside the six of a person
    2  a person   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    3  mpirun     OMPI_COMM_WORLD_RANK ... (Open MPI), PMI_RANK and MPI_LOCALRANKID ... (MPICH, Intel MPI)
    4  srun       SLURM_PROCID ... and SLURM_STEP_ID, which a batch script has not: there we are no rank

A variable of a person beside a full set of mpirun or srun has to say the same, or it is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from everyrank.errors import UsageError
from everyrank.launch.facts import RankFacts
from everyrank.launch.hosts import addresses_of

__all__ = ["facts_from_environment", "first_host", "tasks_per_node", "threads_asked", "whole_number"]

_PERSON = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_MPICH = ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS")
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", "SLURM_JOB_ID")
_LAST_STEP = 0xFFFF_0000  # above are those that srun did not start: the batch script, the shell of salloc
_FIRST_PORT, _NUM_PORTS = 12_000, 20_000  # below those that systems give to outgoing connections


def facts_from_environment(environment: Mapping[str, str]) -> RankFacts | None:
    """The facts that a launcher, or a person, put into the environment; None where nobody started us as a rank.

    Raises `UsageError` for an incomplete set, and for sets that contradict each other.
    """
    present = [name for name in _PERSON if environment.get(name)]
    if len(present) == len(_PERSON):
        facts = _of_person(environment)
        if facts.started_by == "torchrun":
            _check_torchrun_in_slurm(environment)
        return dataclasses.replace(facts, threads=threads_asked(environment))
    facts = _of_mpi(environment) or _of_slurm(environment)
    if facts is not None:
        _check_agreement(environment, facts)
        return dataclasses.replace(facts, threads=threads_asked(environment))
    program = "torchrun"
    missing = [name for name in _PERSON if name not in present]
    if "RANK" not in present and "WORLD_SIZE" not in present:
        program = "mpirun"
        present, missing = _part_of_mpi(environment)
        if not present:
            return None
    raise UsageError(
        f"the environment has {', '.join(present)} but not {', '.join(missing)}: "
        f"start with {program}, or unset {present[0]}"
    )


def _of_person(environment: Mapping[str, str]) -> RankFacts:
    rank, local_rank, size, local_size = _numbers(environment, _PERSON[:4])
    port, attempt = _numbers(
        {"TORCHELASTIC_RESTART_COUNT": "0", **environment}, ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    )
    agent_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankFacts(
        rank=rank,
        local_rank=local_rank,
        size=size,
        local_size=local_size,
        started_by="torchrun" if "TORCHELASTIC_RUN_ID" in environment else "env",
        rendezvous=f"tcp://{environment['MASTER_ADDR']}:{port}",
        hosts_store=rank == 0 and not agent_store,
        attempt=attempt,
    )


def _of_mpi(environment: Mapping[str, str]) -> RankFacts | None:
    for names in (_OPEN_MPI, _MPICH):
        if all(environment.get(name) for name in names):
            rank, local_rank, size, local_size = _numbers(environment, names)
            return _facts("mpi", environment, (rank, local_rank, size, local_size), None)
    return None


def _part_of_mpi(environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """What there is, and what is missing, of a set that says which rank this is, but not all of it."""
    for names in (_OPEN_MPI, _MPICH):
        present = [name for name in names if environment.get(name)]
        if names[0] in present and len(present) < len(names):
            return present, [name for name in names if name not in present]
    return [], []


def _of_slurm(environment: Mapping[str, str]) -> RankFacts | None:
    if environment.get("SLURM_STEP_ID") is None or not all(environment.get(name) for name in _SLURM):
        return None
    rank, local_rank, size = _numbers(environment, _SLURM[:3])
    node, job, step = _numbers(environment, ("SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID"))
    if step > _LAST_STEP:
        return None
    counts = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
    if not 0 <= node < len(counts):
        raise UsageError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE has {len(counts)} nodes: unset both")
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    # A port of this job and step: two of them on one node do not meet. Whoever knows a better one names it.
    port = _FIRST_PORT + (job * 64 + step) % _NUM_PORTS
    return _facts("slurm", environment, (rank, local_rank, size, counts[node]), (first_host(hosts), port))


def _facts(
    started_by: str,
    environment: Mapping[str, str],
    numbers: tuple[int, int, int, int],
    default: tuple[str, int] | None,
) -> RankFacts:
    """The facts of a launcher that says nothing of where its ranks meet."""
    rank, local_rank, size, local_size = numbers
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if address is None and local_size == size:
        # over a file that only the ranks of this launcher know, so that no port is opened
        return RankFacts(rank, local_rank, size, local_size, started_by, _private_file().as_uri())
    if default is not None:
        address, port = address or _address_of_node(default[0]), port or str(default[1])
    rendezvous = f"tcp://{address}:{port}" if address and port else ""
    return RankFacts(rank, local_rank, size, local_size, started_by, rendezvous, hosts_store=rank == 0)


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
        parent = psutil.Process(os.getppid())
        own = [str(parent.pid), f"{parent.create_time():.2f}"]
    return folder / re.sub(r"[^\w.-]", "_", "-".join(["meeting", *own]))


def _address_of_node(name: str) -> str:
    """The name itself where it has an address; else the one that Slurm knows."""
    if addresses_of(name) or shutil.which("scontrol") is None:
        return name
    shown = subprocess.run(
        ["scontrol", "show", "node", "--oneliner", name], capture_output=True, text=True, timeout=30, check=False
    )
    found = re.search(r"\bNodeAddr=(\S+)", shown.stdout)
    return found[1] if found else name


def _check_agreement(environment: Mapping[str, str], facts: RankFacts) -> None:
    """A variable that a person left beside srun's or mpirun's full set."""
    own = {
        "RANK": facts.rank,
        "WORLD_SIZE": facts.size,
        "LOCAL_RANK": facts.local_rank,
        "LOCAL_WORLD_SIZE": facts.local_size,
    }
    for name, value in own.items():
        text = environment.get(name)
        if text and text != str(value):
            program = "srun" if facts.started_by == "slurm" else "mpirun"
            fix = f"start {text} tasks (--ntasks={text}), or unset {name}" if name == "WORLD_SIZE" else f"unset {name}"
            raise UsageError(
                f"{name}={text} in the environment, but {program} says {value} (of {facts.size} ranks): {fix}"
            )


def _check_torchrun_in_slurm(environment: Mapping[str, str]) -> None:
    """Srun has to start one torchrun on each node, which then starts the ranks there."""
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE")
    if environment.get("SLURM_STEP_ID") is None or not tasks:
        return
    most = max(tasks_per_node(tasks))
    if most > 1:
        raise UsageError(
            f"srun started {most} tasks on a node (SLURM_STEP_TASKS_PER_NODE={tasks}) and each a torchrun of its own: "
            "--ntasks-per-node=1 with torchrun, which starts the ranks of the node itself"
        )


def threads_asked(environment: Mapping[str, str]) -> int | None:
    """CPU threads of each process that a person has asked for; None where nobody has.

    torchrun itself sets OMP_NUM_THREADS=1 for several ranks, where nobody has set it: then what counts is the
    environment that torchrun was started in.
    """
    found = _threads_in(environment)
    if found == 1 and "TORCHELASTIC_RUN_ID" in environment:
        return _threads_in(_before_torchrun())
    return found


def _threads_in(environment: Mapping[str, str]) -> int | None:
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):  # torch, too, takes the first of these that is set
        first = environment.get(name, "").split(",")[0].strip()  # OpenMP takes a number for each level of nesting
        if first.isdecimal() and 0 < len(first) < 10 and int(first) > 0:
            return int(first)
    return None


def _before_torchrun() -> Mapping[str, str]:
    """The environment of the process that started the ranks, before it changed it; nothing where it cannot be read."""
    with contextlib.suppress(psutil.Error, OSError):
        for process in psutil.Process().parents():
            own = process.environ()
            if "TORCHELASTIC_RUN_ID" not in own:
                return own
    return {}


def _numbers(environment: Mapping[str, str], names: tuple[str, ...]) -> list[int]:
    found: list[int] = []
    for name in names:
        try:
            found.append(int(environment[name]))
        except ValueError:
            raise UsageError(f"{name}={environment[name]} in the environment: it must be a whole number") from None
    return found


def whole_number(environment: Mapping[str, str], name: str, default: str) -> int:
    """A variable that counts something. Raises `UsageError`."""
    return _numbers({name: default, **environment}, (name,))[0]


def tasks_per_node(text: str) -> list[int]:
    """Slurm's `2(x3),1` -> [2, 2, 2, 1]. Raises `UsageError`."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not found:
            raise UsageError(f"SLURM_STEP_TASKS_PER_NODE={text}: it must be like 2(x3),1")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Slurm's `gpu[07-09,12],login1` -> gpu07."""
    found = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,\[]*)", nodes)
    if not found:
        return nodes
    return found[1] + (re.split(r"[-,]", found[2])[0] if found[2] else "") + found[3]
