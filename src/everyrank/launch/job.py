"""How rank processes start (`Launch`), and what runs in each of them (`Job`)."""

from __future__ import annotations

import importlib
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyrank.errors import UsageError
from everyrank.fields import check_fields
from everyrank.launch.host_info import split_endpoint
from everyrank.launch.launcher import DEFAULT_LAUNCHER, Launcher, LauncherOptions, launcher_named

__all__ = [
    "BACKEND_NAMES",
    "FORK_SERVER",
    "PYTHON",
    "WORKER",
    "Job",
    "Launch",
    "is_named_by_rendezvous",
    "job_name",
    "named_function",
    "starts_supervisors",
]

PYTHON = (sys.executable, "-P")  # do not import from the current folder, which may have a json.py
WORKER = (*PYTHON, "-m", "everyrank.launch.worker")
FORK_SERVER = (*PYTHON, "-m", "everyrank.launch.fork_server")
# Larger numbers are typing errors, because no such machine exists.
_MAX_PROCESSES, _MAX_PROCESSES_PER_NODE = 1_000_000, 4_096
_MAX_TIMEOUT_SECONDS = 10_000_000  # four months; 32-bit clocks overflow not far above

BACKEND_NAMES = ("shm", "gloo", "nccl", "mpi")


@dataclass(frozen=True)
class Launch:
    """How rank processes start. Same as the launching options of the command line.

    Attributes:
        launcher: spawn, torchrun, slurm, mpi, ray or horovodrun.
        processes: Total number of ranks over all nodes.
        device: cpu or cuda. None: cuda if there is a GPU.
        backend: shm, gloo, nccl or mpi. None: chosen from device and number of nodes.
        loader_workers: Data loader processes of each rank. 0: the rank loads the data itself.
        timeout_seconds: Longest wait for another rank, in a collective and at the end.
        start_timeout_seconds: Longest wait until the first update is done, which compiles, fills caches and opens
            connections. None: `timeout_seconds`.
        logs: Folder for the logs of the ranks. None: a temporary one, kept only after a failure.
        nodes: Number of hosts. Each runs processes // nodes ranks.
        node_rank: Number of this host, for spawn and torchrun, where you type the command on each host.
        rendezvous: HOST:PORT where the hosts meet, if no scheduler has connected them.
        init_method: env, tcp://host:port, file:///path, or (rank, size) -> a store. None: depends on the launcher.
        interface: Network interface between hosts. None: the one on the route to the rendezvous.
        arguments: Additional arguments for mpirun, srun, torchrun or horovodrun.
        options: Options of the launcher: `TorchrunOptions`, `SlurmOptions`, `RayOptions`. None: their defaults.

    Raises:
        UsageError: A value is invalid.

    Examples:
        >>> from everyrank import Launch
        >>> Launch("torchrun", processes=8, nodes=2, node_rank=0, rendezvous="10.0.0.1:29500").processes_per_node
        4
    """

    launcher: str = DEFAULT_LAUNCHER
    processes: int = 1
    device: str | None = None
    backend: str | None = None
    loader_workers: int = 0
    timeout_seconds: float = 300.0
    start_timeout_seconds: float | None = None
    logs: Path | None = None
    nodes: int = 1
    node_rank: int | None = None
    rendezvous: str | None = None
    init_method: str | Callable[[int, int], Any] | None = None
    interface: str | None = None
    arguments: tuple[str, ...] = ()
    options: Any = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.options is None:
            object.__setattr__(self, "options", self.row.options())
        self._check_processes()
        self._check_nodes()
        if type(self.options) is not self.row.options:
            raise UsageError(f"options={self.options!r}: give the options of --launcher {self.launcher}")
        self.row.check(self)
        self._check_rendezvous_of_nodes()
        if self.arguments and not self.row.accepts_arguments:
            raise UsageError(
                f"--launcher-args {' '.join(self.arguments)}: not supported by --launcher {self.launcher}; leave it out"
            )
        if isinstance(self.init_method, str):
            _check_init_method(self.init_method)

    def _check_processes(self) -> None:
        if self.processes < 1:
            raise UsageError(f"--processes {self.processes}: give at least 1")
        if self.processes > _MAX_PROCESSES:
            raise UsageError(f"--processes {self.processes}: too many ranks; give at most {_MAX_PROCESSES:,}")
        if self.device not in (None, "cpu", "cuda"):
            raise UsageError(f"--device {self.device}: give cpu or cuda")
        if self.backend not in (None, *BACKEND_NAMES):
            raise UsageError(f"--backend {self.backend}: give {', '.join(BACKEND_NAMES)}")
        if self.loader_workers < 0:
            raise UsageError(f"--workers {self.loader_workers}: give 0 or more")
        for flag, seconds in (("--timeout", self.timeout_seconds), ("--start-timeout", self.start_seconds)):
            if not 0 < seconds <= _MAX_TIMEOUT_SECONDS:
                raise UsageError(f"{flag} {seconds:g}: give more than 0 seconds, and at most {_MAX_TIMEOUT_SECONDS:,}")

    def _check_nodes(self) -> None:
        if self.nodes < 1:
            raise UsageError(f"--nodes {self.nodes}: give at least 1")
        if self.processes % self.nodes:
            raise UsageError(
                f"--processes {self.processes} --nodes {self.nodes}: all nodes run the same number of ranks, and "
                f"--processes is the total over all nodes; give --processes {self.nodes}, or a multiple of it"
            )
        if self.processes_per_node > _MAX_PROCESSES_PER_NODE:
            raise UsageError(
                f"--processes {self.processes} --nodes {self.nodes}: {self.processes_per_node:,} ranks do "
                f"not fit into the memory of a host; give at most {_MAX_PROCESSES_PER_NODE:,} for each"
            )
        if self.node_rank is not None and not 0 <= self.node_rank < self.nodes:
            raise UsageError(f"--node-rank {self.node_rank}: give 0 to {self.nodes - 1} with --nodes {self.nodes}")
        if self.rendezvous is not None:
            split_endpoint(self.rendezvous, "--rendezvous")

    def _check_rendezvous_of_nodes(self) -> None:
        """Check that a launcher whose command is typed on each host has the rendezvous and the number of this host."""
        if self.nodes > 1 and not self.row.supports_nodes:
            raise UsageError(f"--nodes {self.nodes}: not supported by --launcher {self.launcher}; leave --nodes out")
        if self.nodes == 1 or not self.row.launch_per_node:
            return
        if self.rendezvous is None:
            raise UsageError(
                f"--nodes {self.nodes}: no rendezvous was given; add --rendezvous HOST:PORT, where HOST is node 0"
            )
        if self.node_rank is None and not self.assigns_node_ranks:
            raise UsageError(
                f"--nodes {self.nodes}: the number of this host was not given; add --node-rank 0 to {self.nodes - 1}"
            )

    @property
    def row(self) -> Launcher:
        """The launcher. Raises `UsageError` for an unknown name."""
        return launcher_named(self.launcher)

    @property
    def rank_launcher(self) -> Launcher:
        """The launcher that starts the rank processes: with --per-node, the one that runs on each node."""
        return launcher_named(self._options.rank_launcher or self.launcher)

    @property
    def _options(self) -> LauncherOptions:
        return self.options

    @property
    def assigns_node_ranks(self) -> bool:
        """Whether `node_rank` is not needed, because the launcher numbers the hosts."""
        return self._options.assigns_node_ranks

    @property
    def start_seconds(self) -> float:
        """The longest wait for another rank until the first update is done."""
        return self.timeout_seconds if self.start_timeout_seconds is None else self.start_timeout_seconds

    @property
    def start_flag(self) -> str:
        """The flag of the command line that sets `start_seconds`."""
        return "--timeout" if self.start_timeout_seconds is None else "--start-timeout"

    @property
    def restarts_ranks(self) -> bool:
        """Whether the launcher starts all ranks again after a failure."""
        return self._options.restarts_ranks

    @property
    def is_elastic(self) -> bool:
        """Whether ranks may join the running job."""
        return self._options.is_elastic

    @property
    def min_nodes(self) -> int | None:
        """The smallest number of nodes with which the job runs; None: the number is fixed."""
        return self._options.min_nodes

    @property
    def fewer_processes(self) -> range | None:
        """The numbers of ranks below `processes` with which the job may run; None: the number is fixed."""
        if self.min_nodes is not None:
            return range(self.min_nodes * self.processes_per_node, self.processes, self.processes_per_node)
        min_processes: int | None = self._options.min_processes
        return None if min_processes is None else range(min_processes, self.processes)

    @property
    def processes_per_node(self) -> int:
        """The number of ranks on each host."""
        return self.processes // self.nodes


def _check_init_method(text: str) -> None:
    """Raise `UsageError` for an unknown init method."""
    if text == "env":
        return
    kind, _, location = text.partition("://")
    if kind == "tcp":
        split_endpoint(location, "--init-method tcp://")
    elif kind != "file" or not location.startswith("/") or location.endswith("/"):
        raise UsageError(f"--init-method {text}: give env, tcp://HOST:PORT or file:///PATH")


def starts_supervisors(commands: Sequence[Sequence[str]]) -> bool:
    """Whether these commands start supervisors of ranks or a fork server, not another program that starts them."""
    return all(tuple(command[: len(WORKER)]) in (WORKER, FORK_SERVER) for command in commands)


def named_function(function: Callable[..., Any] | str) -> Callable[..., Any]:
    """Return a function, or import "module:name", so that the calling process need not import torch."""
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    imported: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return imported


def job_name(launch: Launch, directory: Path) -> str:
    """Return a name that the ranks of one start share on all hosts, without characters that a file name cannot have.

    A launcher that is started on each host has a job folder on each. Then only the rendezvous is common, which an
    earlier start may have had, too.
    """
    if is_named_by_rendezvous(launch):
        return re.sub(r"[^\w.-]", "_", launch.rendezvous or "")
    return directory.name


def is_named_by_rendezvous(launch: Launch) -> bool:
    """Whether the rendezvous is all that the hosts of this job have in common."""
    return launch.nodes > 1 and launch.row.launch_per_node and launch.rendezvous is not None


@dataclass(frozen=True)
class Job:
    """The content of job.pickle, which each rank process reads. The payload is unpickled after `sys_path` is set.

    rendezvous_url  where the ranks meet; None: their launcher provides it
    pid_namespace   where `parent_pid` is valid; elsewhere the folder shows whether the parent is alive
    keeps_logs      whether the user chose the folder of the logs
    threads         CPU threads per process set by the user
    preload         module that a fork server imports before it forks the ranks
    is_restarted    whether the launcher starts the ranks again when they fail
    name            distinguishes the states of these ranks from those of earlier starts (`job_name`)
    is_name_unique  whether no earlier start has had this name
    """

    payload: bytes
    sys_path: list[str]
    launcher: str
    processes: int
    rendezvous_url: str | None
    pid_namespace: str
    parent_pid: int
    logs: Path
    keeps_logs: bool
    threads: int | None = None
    preload: str = "torch"
    is_restarted: bool = False
    name: str = ""
    is_name_unique: bool = True

    def function(self) -> Callable[..., Any]:
        """Return the function to call. A function given by name is imported here, not in the calling process."""
        return named_function(pickle.loads(self.payload)[0])  # noqa: S301  (written by our own parent)

    def arguments(self) -> tuple[Any, ...]:
        """Its arguments after the `RankInfo`."""
        return pickle.loads(self.payload)[1]  # noqa: S301
