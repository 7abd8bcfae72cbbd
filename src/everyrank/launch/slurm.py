"""slurm: srun inside an allocation starts the ranks; outside one, sbatch is given a script that does.

The job's folder has to be on storage that all hosts share, as home directories of clusters are.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyrank.errors import CannotRunError, UsageError
from everyrank.launch.hosts import addresses_of
from everyrank.launch.job import PYTHON, WORKER, Launch
from everyrank.launch.launcher import Environment, Launcher, Scheduler, launchers
from everyrank.launch.rank_info import RankInfo
from everyrank.launch.variables import rank_info_of_task, whole_number, whole_numbers

__all__ = [
    "LAUNCHER",
    "BatchScript",
    "SlurmOptions",
    "check_allocation",
    "first_host",
    "render",
    "requeue",
    "script",
    "tasks_per_node",
]

_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", "SLURM_JOB_ID")
_LAST_STEP = 0xFFFF_0000  # above are those that srun did not start: the batch script, the shell of salloc
_FIRST_PORT, _NUM_PORTS = 12_000, 20_000  # below those that systems give to outgoing connections


@dataclass(frozen=True)
class SlurmOptions:
    """Slurm's own options.

    per_node    one task on each node, and in it this launcher; None: one task for each rank
    min_nodes   the batch job begins with as few nodes where Slurm has no more; None: with exactly so many
    """

    per_node: str | None = None
    min_nodes: int | None = None


def render(launch: Launch, directory: Path) -> list[list[str]]:
    """One srun: one task for each rank, or one for each node, which starts its own ranks."""
    tasks = launch.nodes if launch.options.per_node else launch.processes
    command = ["srun", f"--nodes={launch.nodes}", f"--ntasks={tasks}", f"--ntasks-per-node={tasks // launch.nodes}"]
    # the ranks of a node share its cores, and divide them themselves; no MPI is spoken
    command += ["--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=1", "--input=none", *launch.arguments]
    if launch.options.per_node:
        node = [*PYTHON, "-m", "everyrank.launch.node", launch.options.per_node, str(launch.processes_per_node)]
        return [[*command, *node, str(directory)]]
    return [[*command, *WORKER, str(directory)]]


def check_allocation(launch: Launch, environment: Mapping[str, str]) -> None:
    """Whether the allocation has the tasks that were asked for. Raises `UsageError`."""
    nodes, tasks = environment.get("SLURM_NNODES", "1"), environment.get("SLURM_NTASKS")
    if str(launch.nodes) != nodes:
        raise UsageError(f"--nodes {launch.nodes}, but the allocation has SLURM_NNODES={nodes}: leave --nodes out")
    if tasks is None or launch.options.per_node or tasks == str(launch.processes):
        return
    if tasks == nodes:
        raise UsageError(
            f"the allocation has one task on each of its {nodes} nodes (SLURM_NTASKS={tasks}), but {launch.processes} "
            f"ranks were asked for: allocate --ntasks-per-node={launch.processes_per_node}, or add --per-node spawn"
        )
    raise UsageError(
        f"--processes {launch.processes}, but the allocation has SLURM_NTASKS={tasks}: --processes {tasks}, or "
        f"allocate --ntasks={launch.processes}"
    )


def _check(launch: Launch) -> None:
    options: SlurmOptions = launch.options
    _check_per_node(options, is_chosen=True)
    if options.min_nodes is not None and not 1 <= options.min_nodes <= launch.nodes:
        raise UsageError(f"--nodes {options.min_nodes}:{launch.nodes}: give MIN:MAX, from 1 on")


def _check_per_node(options: SlurmOptions, is_chosen: bool) -> None:
    starters = [row.name for row in launchers() if row.render_on_node is not None]
    if options.per_node is not None and not (is_chosen and options.per_node in starters):
        raise UsageError(f"--per-node {options.per_node}: give {' or '.join(starters)}, with --launcher slurm")


def _check_start(launch: Launch, environment: Mapping[str, str]) -> None:
    if "SLURM_JOB_ID" not in environment:
        raise UsageError("--launcher slurm: there is no allocation (SLURM_JOB_ID is not set); salloc first, or sbatch")
    check_allocation(launch, environment)


def _find() -> str:
    require("srun")
    return f"{shutil.which('srun')}"


# --- the command line


def _add_arguments(group: Any) -> None:
    group.add_argument("--per-node", metavar="P", help="slurm: one task a node, and in it spawn or torchrun")
    group.add_argument(
        "--sbatch", nargs="+", action="extend", default=[], metavar="K=V", help="slurm: any options of sbatch"
    )
    group.add_argument("--prologue", type=Path, metavar="F", help="slurm: a file of commands that come before")
    group.add_argument(
        "--requeue", action="store_true", help="slurm: preempted, out of time or a rank lost: queue again"
    )


def _read_options(args: argparse.Namespace, is_chosen: bool) -> SlurmOptions:
    options = SlurmOptions(args.per_node, args.min_nodes if is_chosen else None)
    _check_per_node(options, is_chosen)
    return options


def _check_batch_options(args: argparse.Namespace) -> None:
    words = {"--sbatch": args.sbatch, "--prologue": args.prologue, "--requeue": args.requeue}
    for flag, value in words.items():
        if value:
            shown = "" if value is True else f" {value if isinstance(value, Path) else ' '.join(value)}"
            raise UsageError(f"{flag}{shown}: it is Slurm that has batch jobs; give --launcher slurm too")


def _script(launch: Launch, args: argparse.Namespace, command: Sequence[str], folder: Path, name: str) -> str:
    options: dict[str, str] = {}
    for word in args.sbatch:
        key, _, value = word.partition("=")
        options[key.lstrip("-")] = value
    return script(launch, BatchScript(options, args.prologue, args.requeue), command, folder, name)


# --- the environment


def _allocated_nodes(environment: Mapping[str, str]) -> int | None:
    return whole_number(environment, "SLURM_NNODES", "1") if "SLURM_JOB_ID" in environment else None


def _allocated_processes(environment: Mapping[str, str], options: SlurmOptions) -> int | None:
    tasks = environment.get("SLURM_NTASKS", "")
    return int(tasks) if tasks.isdecimal() and options.per_node is None else None


def _check_forgotten(environment: Mapping[str, str]) -> None:
    """In an allocation of several tasks, without srun: the ranks would all start on this node."""
    job, nodes = environment.get("SLURM_JOB_ID"), environment.get("SLURM_NNODES", "1")
    tasks = environment.get("SLURM_NTASKS", "1")
    if job is not None and (nodes, tasks) != ("1", "1"):
        raise UsageError(
            f"this is Slurm job {job} (SLURM_JOB_ID={job}) of {tasks} tasks on {nodes} node{'s' * (nodes != '1')}, and "
            "nobody said how to use them: --launcher slurm (or srun before the command), or --launcher spawn for this "
            "node alone"
        )


def _read(environment: Mapping[str, str]) -> RankInfo | None:
    if environment.get("SLURM_STEP_ID") is None or not all(environment.get(name) for name in _SLURM):
        return None
    rank, local_rank, size = whole_numbers(environment, _SLURM[:3])
    node, job, step = whole_numbers(environment, ("SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID"))
    if step > _LAST_STEP:
        return None
    counts = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
    if not 0 <= node < len(counts):
        raise UsageError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE has {len(counts)} nodes: unset both")
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    # A port of this job and step: two of them on one node do not meet. Whoever knows a better one names it.
    port = _FIRST_PORT + (job * 64 + step) % _NUM_PORTS
    place = (rank, local_rank, size, counts[node])
    return rank_info_of_task("slurm", environment, place, lambda: _address_of_node(first_host(hosts)), port)


def _address_of_node(name: str) -> str:
    """The name itself where it has an address; else the one that Slurm knows."""
    if addresses_of(name) or shutil.which("scontrol") is None:
        return name
    shown = subprocess.run(
        ["scontrol", "show", "node", "--oneliner", name], capture_output=True, text=True, timeout=30, check=False
    )
    found = re.search(r"\bNodeAddr=(\S+)", shown.stdout)
    return found[1] if found else name


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


def _check_nested(environment: Mapping[str, str], inner: Launcher) -> None:
    """One that starts all ranks of a host has to be started once on each node."""
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE")
    if not inner.one_command_per_host or environment.get("SLURM_STEP_ID") is None or not tasks:
        return
    most = max(tasks_per_node(tasks))
    if most > 1:
        raise UsageError(
            f"srun started {most} tasks on a node (SLURM_STEP_TASKS_PER_NODE={tasks}) and each a {inner.name} of its "
            f"own: --ntasks-per-node=1 with {inner.name}, which starts the ranks of the node itself"
        )


def _check_started(environment: Mapping[str, str], info: RankInfo, asked: int | None, uses_devices: bool) -> None:
    """Fewer tasks than were meant: one for each node, or one where there are several GPUs."""
    nodes = whole_number(environment, "SLURM_NNODES", "1")
    if asked not in (None, info.size) and info.size == nodes and asked % nodes == 0:
        raise UsageError(
            f"--processes {asked}, but srun started one task on each of {nodes} nodes: "
            f"srun --ntasks-per-node={asked // nodes}"
        )
    cards = environment.get("SLURM_GPUS_ON_NODE", "")
    idle = int(cards) - info.local_size if cards.isdecimal() else 0
    if idle > 0 and asked is None and uses_devices:
        tasks = f"{info.local_size} task{'s' * (info.local_size > 1)}"
        raise UsageError(
            f"srun started {tasks} on a node with {cards} GPUs, of which {idle} would be idle: "
            f"srun --ntasks-per-node={cards} (or --processes {info.size} if that is meant)"
        )


WARNING_SECONDS = 120  # between the signal that the time is up, and the end


# --- batch jobs: the script, handing it to sbatch, putting a job into the queue again


@dataclass(frozen=True)
class BatchScript:
    """What a batch job is asked for with.

    options    of sbatch, by their long names: {"partition": "gpu", "time": "1:00:00", "exclusive": ""}
    prologue   a file of shell commands that come before (module load ...)
    requeue    when preempted, or at the end of its time: save, and wait in the queue again; also when a rank is lost
    """

    options: Mapping[str, str]
    prologue: Path | None = None
    requeue: bool = False


def script(launch: Launch, batch: BatchScript, command: Sequence[str], folder: Path, name: str) -> str:
    """The batch script. `command` is run in `folder`, and in the allocation it finds srun. Raises `UsageError`."""
    per_node = 1 if launch.options.per_node else launch.processes_per_node
    options = {
        "job-name": name,
        "nodes": str(launch.nodes),
        "ntasks": str(launch.nodes * per_node),
        "ntasks-per-node": str(per_node),
        "output": str(folder).replace("%", "%%") + "/slurm-%j.out",
    }
    if launch.min_nodes not in (None, launch.nodes):
        # tasks are counted when the job first begins, and one that is put back would then wait for as many nodes: so
        # none are asked for but processors, which srun gives to the tasks
        options["nodes"] = f"{launch.min_nodes}-{launch.nodes}"
        options["mincpus"] = str(launch.processes_per_node)
        del options["ntasks"], options["ntasks-per-node"]
    if batch.requeue:
        # the batch shell alone gets the signal (B:); `exec` below makes it everyrank, which asks the ranks to stop
        options |= {"requeue": "", "open-mode": "append", "signal": f"B:USR1@{WARNING_SECONDS}"}
    lines = ["#!/bin/bash"]
    for key, value in (options | dict(batch.options)).items():
        lines.append(f"#SBATCH --{_word(key)}" + (f"={_quoted(key, value)}" if value else ""))
    lines.append(f"cd -- {shlex.quote(str(folder))} || exit 2")
    if batch.prologue is not None:  # before any `set`: module and conda read variables that are not set
        lines += [f"# --- {_comment(str(batch.prologue))}", _text_of(batch.prologue), "# ---"]
    return "\n".join([*lines, f"exec {shlex.join(command)}", ""])


def _word(key: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9-]+", key):
        raise UsageError(f"--sbatch {_comment(key)}: give long names of sbatch's options, like partition=gpu")
    return key


def _quoted(key: str, value: str) -> str:
    """Sbatch reads its lines itself: spaces need quotes, and no shell sees `$()`."""
    if any(not letter.isprintable() for letter in value):
        raise UsageError(f"--sbatch {key}={value!r}: it must be printable, and on one line")
    plain = value.replace("\\", "\\\\").replace('"', '\\"')
    return value if value == plain and not set(value) & set(" '#") else f'"{plain}"'


def _comment(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prologue {path}: {getattr(error, 'strerror', None) or error}") from error


def submit(text: str, path: Path) -> str:
    """Write the script and give it to sbatch: the number of the job. Raises `CannotRunError` without a sbatch."""
    require("sbatch")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no reason given"]
        raise UsageError(f"sbatch refused {path}: {said[-1]}")
    return done.stdout.strip().partition(";")[0]


def require(program: str) -> None:
    """Raises `CannotRunError` where a program of Slurm's is not there."""
    if shutil.which(program) is None:
        raise CannotRunError(f"--launcher slurm: there is no {program} here; type this on a login node of your cluster")


def requeue(job: str) -> None:
    """Put this job into the queue again. Raises `CannotRunError` with what Slurm said against it."""
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise CannotRunError(f"job {job} could not be put into the queue again: {done.stderr.strip()}")


LAUNCHER = Launcher(
    name="slurm",
    render=render,
    find=_find,
    check=_check,
    check_start=_check_start,
    options=SlurmOptions,
    add_arguments=_add_arguments,
    read_options=_read_options,
    min_nodes=lambda options: options.min_nodes,
    rank_launcher=lambda options: options.per_node,
    reads_job_folder=True,
    rank_0_is_here=False,
    needs_sigterm=True,
    trusts_address=lambda host: host.startswith("127."),  # several nodes on one machine, which loopback joins
    environment=Environment(
        program="srun",
        depth=1,
        rank_variables=("SLURM_PROCID",),
        read=_read,
        check_nested=_check_nested,
        check_started=_check_started,
        shell_hint=" (in a shell that srun has started: unset SLURM_STEP_ID)",
    ),
    scheduler=Scheduler(
        has_allocation=lambda environment: "SLURM_JOB_ID" in environment,
        allocated_nodes=_allocated_nodes,
        allocated_processes=_allocated_processes,
        check_forgotten=_check_forgotten,
        check_options=_check_batch_options,
        script=_script,
        submit=submit,
        output=lambda job: f"slurm-{job}.out",
    ),
    needs_program=("srun", "apt install slurm-wlm, or ask your cluster's staff"),
)
