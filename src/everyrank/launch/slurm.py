"""slurm: srun inside an allocation starts the ranks; outside one, a batch script that does so is submitted by sbatch.

The job's folder must be on storage that all hosts share, as home directories of clusters are.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from everyrank.errors import CannotRunError, UsageError
from everyrank.launch.host_info import addresses_of
from everyrank.launch.job import PYTHON, WORKER, Launch
from everyrank.launch.launcher import BatchLauncher, Launcher, LauncherOptions, launchers, run_program
from everyrank.launch.rank_info import RankInfo, rank_info_of_task, whole_number, whole_numbers
from everyrank.options import Argument

__all__ = [
    "LAUNCHER",
    "BatchOptions",
    "SlurmOptions",
    "check_allocation",
    "first_host",
    "requeue",
    "tasks_per_node",
]

_TASK_VARIABLES = (
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NODEID",
    "SLURM_JOB_ID",
)
_LAST_STEP = 0xFFFF_0000  # higher numbers are not steps of srun: the batch script, the shell of salloc
_FIRST_PORT, _NUM_PORTS = 12_000, 20_000  # below the ports that systems use for outgoing connections
_WARNING_SECONDS = 120  # between the signal before the time limit and the end of the job
_NO_JOB = "--launcher slurm: there is no allocation (SLURM_JOB_ID is not set); run salloc or sbatch first"


@dataclass(frozen=True)
class SlurmOptions(LauncherOptions):
    """Options of srun.

    per_node    start one task on each node, in which this launcher starts the ranks; None: one task for each rank
    min_nodes   the batch job starts with at least this many nodes if Slurm has no more; None: the number is fixed
    """

    per_node: Annotated[
        str | None, Argument("slurm: one task on each node, in which spawn or torchrun starts the ranks", "P")
    ] = None
    min_nodes: int | None = None

    @property
    def rank_launcher(self) -> str | None:
        """The launcher given by --per-node."""
        return self.per_node


@dataclass(frozen=True)
class BatchOptions:
    """Options of a batch job.

    sbatch     options of sbatch by their long names: ("partition=gpu", "time=1:00:00", "exclusive")
    prologue   a file of shell commands to run first (module load ...)
    requeue    when preempted, or at the time limit, save and queue the job again; also after a rank was lost
    """

    sbatch: Annotated[tuple[str, ...], Argument("slurm: any options of sbatch", "K=V")] = ()
    prologue: Annotated[Path | None, Argument("slurm: a file of shell commands to run first", "F")] = None
    requeue: Annotated[bool, Argument("slurm: queue again when preempted, out of time or a rank was lost")] = False


class Slurm(BatchLauncher):
    """One srun for all ranks."""

    name = "slurm"
    program = "srun"
    install_hint = "apt install slurm-wlm, or ask your cluster's staff"
    options = SlurmOptions
    batch_options = BatchOptions
    accepts_arguments = True
    supports_nodes = True
    needs_shared_folder = True
    graceful_shutdown = True
    nesting_level = 1
    node_variables = ("SLURM_NODEID", "SLURM_STEP_NUM_NODES")
    rank_variables = (("SLURM_PROCID",),)
    shell_hint = " (in a shell started by srun: unset SLURM_STEP_ID)"

    def commands(self, launch: Launch, job_folder: Path) -> list[list[str]]:
        """One srun: a task for each rank, or for each node (--per-node)."""
        options: SlurmOptions = launch.options
        tasks = launch.nodes if options.per_node else launch.processes
        command = ["srun", f"--nodes={launch.nodes}", f"--ntasks={tasks}", f"--ntasks-per-node={tasks // launch.nodes}"]
        # The ranks of a node divide its cores, and no rank uses MPI.
        command += ["--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=1", "--input=none", *launch.arguments]
        if options.per_node:
            command += [*PYTHON, "-m", "everyrank.launch.node", options.per_node, str(launch.processes_per_node)]
            return [[*command, str(job_folder)]]
        return [[*command, *WORKER, str(job_folder)]]

    def find(self) -> str:
        """Return the path of srun."""
        return _path_of("srun")

    def check(self, launch: Launch) -> None:
        """Check the options."""
        options: SlurmOptions = launch.options
        names = [launcher.name for launcher in launchers() if launcher.launch_per_node]
        if options.per_node not in (None, *names):
            raise UsageError(f"--per-node {options.per_node}: give {' or '.join(names)}")
        if options.min_nodes is not None and not 1 <= options.min_nodes <= launch.nodes:
            raise UsageError(f"--nodes {options.min_nodes}:{launch.nodes}: give MIN:MAX with 1 <= MIN <= MAX")

    def rank_info(self, environment: Mapping[str, str]) -> RankInfo | None:
        """Return the rank of a task of srun. A batch script and the shell of salloc are not ranks."""
        names = ("SLURM_STEP_ID", *_TASK_VARIABLES)
        if not all(environment.get(name) for name in names):
            return None
        rank, local_rank, size = whole_numbers(environment, _TASK_VARIABLES[:3])
        node, job, step = whole_numbers(environment, ("SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID"))
        if step > _LAST_STEP:
            return None
        counts = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
        if not 0 <= node < len(counts):
            raise UsageError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE has {len(counts)} nodes: unset both")
        hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        # Different jobs and steps mostly get different ports. MASTER_PORT overrides it.
        port = _FIRST_PORT + (job * 64 + step) % _NUM_PORTS
        numbers = (rank, local_rank, size, counts[node])
        return rank_info_of_task(self.name, environment, numbers, lambda: _address_of_node(first_host(hosts)), port)

    def allow_loopback(self, host: str) -> bool:
        """Return whether the host is loopback: several nodes of a small Slurm may be one machine."""
        return host.startswith("127.")

    # --- the allocation

    def allocated_nodes(self, environment: Mapping[str, str]) -> int | None:
        """SLURM_NNODES."""
        return whole_number(environment, "SLURM_NNODES", "1") if "SLURM_JOB_ID" in environment else None

    def allocated_processes(self, environment: Mapping[str, str], options: Any) -> int | None:
        """SLURM_NTASKS, unless each task starts several ranks."""
        tasks = environment.get("SLURM_NTASKS", "")
        return int(tasks) if tasks.isdecimal() and options.rank_launcher is None else None

    def check_unused(self, environment: Mapping[str, str]) -> None:
        """Raise `UsageError` without srun, because all ranks would start on this node."""
        job, nodes = environment.get("SLURM_JOB_ID"), environment.get("SLURM_NNODES", "1")
        tasks = environment.get("SLURM_NTASKS", "1")
        if job is not None and (nodes, tasks) != ("1", "1"):
            raise UsageError(
                f"this is Slurm job {job} (SLURM_JOB_ID={job}) of {tasks} tasks on {nodes} node{'s' * (nodes != '1')}, "
                "and no launcher was given: add --launcher slurm (or srun before the command), or --launcher spawn to "
                "use only this node"
            )

    def check_allocation(self, launch: Launch, environment: Mapping[str, str]) -> None:
        """Compare nodes and tasks."""
        if "SLURM_JOB_ID" not in environment:
            raise UsageError(_NO_JOB)
        check_allocation(launch, environment)

    def check_nested(self, environment: Mapping[str, str], inner: Launcher) -> None:
        """Check that a launcher that starts all ranks of a node has one task on each node."""
        tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
        if not inner.launch_per_node or environment.get("SLURM_STEP_ID") is None or not tasks:
            return
        max_tasks = max(tasks_per_node(tasks))
        if max_tasks > 1:
            raise UsageError(
                f"srun started {max_tasks} tasks on a node (SLURM_STEP_TASKS_PER_NODE={tasks}), but each "
                f"{inner.name} starts all ranks of its node; use srun --ntasks-per-node=1"
            )

    def check_tasks(
        self, environment: Mapping[str, str], info: RankInfo, processes: int | None, uses_devices: bool
    ) -> None:
        """Check for one task on each node, where the user often means one for each GPU."""
        nodes = whole_number(environment, "SLURM_NNODES", "1")
        if processes not in (None, info.size) and info.size == nodes and processes % nodes == 0:
            raise UsageError(
                f"--processes {processes}, but srun started one task on each of {nodes} nodes: "
                f"srun --ntasks-per-node={processes // nodes}"
            )
        gpus = environment.get("SLURM_GPUS_ON_NODE", "")
        num_idle = int(gpus) - info.local_size if gpus.isdecimal() else 0
        if num_idle > 0 and processes is None and uses_devices:
            tasks = f"{info.local_size} task{'s' * (info.local_size > 1)}"
            raise UsageError(
                f"srun started {tasks} on a node with {gpus} GPUs, of which {num_idle} would be idle: "
                f"srun --ntasks-per-node={gpus} (or --processes {info.size} if you want that)"
            )

    # --- batch jobs

    def batch_script(self, launch: Launch, batch: BatchOptions, command: Sequence[str], folder: Path, name: str) -> str:
        """Return the script for sbatch. In the allocation, `command` runs srun. Raises `UsageError`."""
        tasks_on_node = 1 if launch.options.per_node else launch.processes_per_node
        options = {
            "job-name": name,
            "nodes": str(launch.nodes),
            "ntasks": str(launch.nodes * tasks_on_node),
            "ntasks-per-node": str(tasks_on_node),
            "output": str(folder).replace("%", "%%") + "/slurm-%j.out",
        }
        if launch.min_nodes not in (None, launch.nodes):
            # Slurm fixes the number of tasks at the first start, and a requeued job would wait for the same number of
            # nodes. So the job requests processors instead, and srun gives them to the tasks.
            options["nodes"] = f"{launch.min_nodes}-{launch.nodes}"
            options["mincpus"] = str(launch.processes_per_node)
            del options["ntasks"], options["ntasks-per-node"]
        if batch.requeue:
            # Slurm sends the signal to the batch shell only (B:). The `exec` below replaces that shell by everyrank,
            # which asks the ranks to stop.
            options |= {"requeue": "", "open-mode": "append", "signal": f"B:USR1@{_WARNING_SECONDS}"}
        for text in batch.sbatch:
            key, _, value = text.partition("=")
            options[key.lstrip("-")] = value
        lines = ["#!/bin/bash"]
        for key, value in options.items():
            lines.append(f"#SBATCH --{_checked_key(key)}" + (f"={_quoted(key, value)}" if value else ""))
        lines.append(f"cd -- {shlex.quote(str(folder))} || exit 2")
        if batch.prologue is not None:  # before any `set -u`: module and conda read variables that are not set
            lines += [f"# --- {_one_line(str(batch.prologue))}", _content(batch.prologue), "# ---"]
        return "\n".join([*lines, f"exec {shlex.join(command)}", ""])

    def submit(self, script: str, path: Path) -> tuple[str, str]:
        """Submit by sbatch. Raises `CannotRunError` if it is not installed, `UsageError` if it refuses the script."""
        _path_of("sbatch")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script, encoding="utf-8")
        result = run_program("sbatch", "--parsable", str(path))
        if result.returncode:
            reasons = result.stderr.strip().splitlines() or ["no reason given"]
            raise UsageError(f"sbatch refused {path}: {reasons[-1]}")
        job = result.stdout.strip().partition(";")[0]
        return job, f"slurm-{job}.out"


def check_allocation(launch: Launch, environment: Mapping[str, str]) -> None:
    """Raise `UsageError` if the allocation has other nodes or tasks than `launch` needs."""
    nodes, tasks = environment.get("SLURM_NNODES", "1"), environment.get("SLURM_NTASKS")
    if str(launch.nodes) != nodes:
        raise UsageError(f"--nodes {launch.nodes}, but the allocation has SLURM_NNODES={nodes}: leave --nodes out")
    if tasks is None or launch.options.per_node or tasks == str(launch.processes):
        return
    if tasks == nodes:
        raise UsageError(
            f"the allocation has one task on each of its {nodes} nodes (SLURM_NTASKS={tasks}), but {launch.processes} "
            f"ranks were requested: allocate --ntasks-per-node={launch.processes_per_node}, or add --per-node spawn"
        )
    raise UsageError(
        f"--processes {launch.processes}, but the allocation has SLURM_NTASKS={tasks}: --processes {tasks}, or "
        f"allocate --ntasks={launch.processes}"
    )


def tasks_per_node(text: str) -> list[int]:
    """Slurm's `2(x3),1` -> [2, 2, 2, 1]. Raises `UsageError`."""
    counts: list[int] = []
    for group in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group.strip())
        if not match:
            raise UsageError(f"SLURM_STEP_TASKS_PER_NODE={text}: it must be like 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Slurm's `gpu[07-09,12],login1` -> gpu07."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,\[]*)", nodes)
    if not match:
        return nodes
    return match[1] + (re.split(r"[-,]", match[2])[0] if match[2] else "") + match[3]


def requeue(job: str) -> None:
    """Put a running job into the queue again. Raises `CannotRunError` with Slurm's reason."""
    result = run_program("scontrol", "requeue", job)
    if result.returncode:
        raise CannotRunError(f"job {job} could not be requeued: {result.stderr.strip()}")


def _address_of_node(name: str) -> str:
    """Return the name of the node if it has an address here; else the address that Slurm has for it."""
    if addresses_of(name) or shutil.which("scontrol") is None:
        return name
    match = re.search(r"\bNodeAddr=(\S+)", run_program("scontrol", "show", "node", "--oneliner", name).stdout)
    return match[1] if match else name


def _path_of(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise CannotRunError(f"--launcher slurm: {program} was not found; run this on a login node of your cluster")
    return path


def _checked_key(key: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9-]+", key):
        raise UsageError(f"--sbatch {_one_line(key)}: give long names of sbatch's options, like partition=gpu")
    return key


def _quoted(key: str, value: str) -> str:
    """Return the value as sbatch reads it: spaces need quotes, and `$()` is not expanded."""
    if not value.isprintable():
        raise UsageError(f"--sbatch {key}={value!r}: it must be printable, and on one line")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return value if value == escaped and not set(value) & set(" '#") else f'"{escaped}"'


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prologue {path}: {getattr(error, 'strerror', None) or error}") from error


LAUNCHER = Slurm()
