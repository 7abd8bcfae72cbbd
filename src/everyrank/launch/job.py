"""What is started: how (`Launch`), and what runs in each process (`Job`)."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyrank.errors import UsageError
from everyrank.fields import check_fields
from everyrank.launch.hosts import split_endpoint
from everyrank.launch.launcher import DEFAULT_LAUNCHER, Launcher, launcher_named

__all__ = ["BACKEND_NAMES", "FORK_SERVER", "PYTHON", "WORKER", "Job", "Launch", "named_function"]

PYTHON = (sys.executable, "-P")  # without the current folder, in which others may have left a json.py
WORKER = (*PYTHON, "-m", "everyrank.launch.worker")
FORK_SERVER = (*PYTHON, "-m", "everyrank.launch.fork_server")
_MOST_PROCESSES, _MOST_ON_A_HOST = 1_000_000, 4_096  # more is a slip of the hand: there is no such machine
_LONGEST_TIMEOUT = 10_000_000  # four months; clocks of 32 bits end not far behind

BACKEND_NAMES = ("shm", "gloo", "nccl", "mpi")


@dataclass(frozen=True)
class Launch:
    """How processes start.

    launcher         a name of `LAUNCHERS`: spawn, torchrun, slurm, mpi, ray or horovodrun
    processes        ranks in all, on all hosts
    device           cpu or cuda; None: cuda where there is one
    backend          one of `BACKEND_NAMES`; None: chosen by `world.choose_backend`
    loader_workers   data loader processes of each rank; 0 loads in the rank itself
    timeout_seconds  longest wait for another rank, in a collective and at the end
    start_timeout_seconds  the same until the first update is done, which compiles, fills caches and makes connections;
                     None: as long as any other
    logs             folder for the ranks' logs; None: a temporary one, kept only after a failure
    nodes            hosts; each has processes // nodes ranks
    node_rank        which of them this is (spawn and torchrun, where this is typed on each host)
    rendezvous       HOST:PORT where hosts meet that no scheduler has brought together
    init_method      env, tcp://host:port, file:///path, or (rank, size) -> a store; None: what suits the launcher
    interface        the network interface between hosts; None: the one that leads to where the ranks meet
    arguments        further words for mpirun, srun, torchrun or horovodrun
    options          the launcher's own: `TorchrunOptions`, `SlurmOptions`, `RayOptions`; None: their defaults

    Raises `UsageError` for a value that cannot be meant.
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
        row = self.row
        if self.options is None and row.options is not None:
            object.__setattr__(self, "options", row.options())
        self._check_processes()
        self._check_nodes()
        if self.options is not None and not isinstance(self.options, row.options or ()):
            raise UsageError(f"options={self.options!r}: they are not those of --launcher {self.launcher}")
        row.check(self)
        self._check_meeting_of_hosts()
        if self.arguments and not row.takes_arguments:
            raise UsageError(f"--launcher-args {' '.join(self.arguments)}: {self.launcher} takes none")
        if isinstance(self.init_method, str):
            check_init_method(self.init_method)

    def _check_processes(self) -> None:
        if self.processes < 1:
            raise UsageError(f"--processes {self.processes}: give at least 1")
        if self.processes > _MOST_PROCESSES:
            raise UsageError(
                f"--processes {self.processes}: no machine has so many ranks; give at most {_MOST_PROCESSES:,}"
            )
        if self.device not in (None, "cpu", "cuda"):
            raise UsageError(f"--device {self.device}: give cpu or cuda")
        if self.backend not in (None, *BACKEND_NAMES):
            raise UsageError(f"--backend {self.backend}: give {', '.join(BACKEND_NAMES)}")
        if self.loader_workers < 0:
            raise UsageError(f"--workers {self.loader_workers}: give 0 or more")
        for name, seconds in (("--timeout", self.timeout_seconds), ("--start-timeout", self.start_seconds)):
            if not 0 < seconds <= _LONGEST_TIMEOUT:
                raise UsageError(f"{name} {seconds:g}: give more than 0 seconds, and at most {_LONGEST_TIMEOUT:,}")

    def _check_nodes(self) -> None:
        if self.nodes < 1:
            raise UsageError(f"--nodes {self.nodes}: give at least 1")
        if self.processes % self.nodes:
            raise UsageError(
                f"--processes {self.processes} --nodes {self.nodes}: each node has as many ranks as the others, "
                f"and this is how many all nodes have; give --processes {self.nodes}, or a multiple of it"
            )
        if self.processes_per_node > _MOST_ON_A_HOST:
            raise UsageError(
                f"--processes {self.processes} --nodes {self.nodes}: {self.processes_per_node:,} ranks on a host, more "
                f"than any has memory for; give at most {_MOST_ON_A_HOST:,} for each"
            )
        if self.node_rank is not None and not 0 <= self.node_rank < self.nodes:
            raise UsageError(f"--node-rank {self.node_rank}: give 0 to {self.nodes - 1} with --nodes {self.nodes}")
        if self.rendezvous is not None:
            split_endpoint(self.rendezvous, "--rendezvous")

    def _check_meeting_of_hosts(self) -> None:
        """Hosts on which the command is typed have to be told where they meet, and which of them each is."""
        if self.nodes == 1 or not self.row.one_command_per_host:
            return
        if self.rendezvous is None:
            raise UsageError(f"--nodes {self.nodes}: where do they meet? --rendezvous HOST:PORT, HOST that of node 0")
        if self.node_rank is None and not self.assigns_node_ranks:
            raise UsageError(f"--nodes {self.nodes}: which of them is this? --node-rank 0 to {self.nodes - 1}")

    @property
    def row(self) -> Launcher:
        """The launcher's row of the table. Raises `UsageError` for a name that none has."""
        return launcher_named(self.launcher)

    @property
    def rank_launcher(self) -> Launcher:
        """The row of the launcher that starts the rank processes: another one where a task on each node does."""
        return launcher_named(self.row.rank_launcher(self.options) or self.launcher)

    @property
    def assigns_node_ranks(self) -> bool:
        """Whether a host need not be told which one it is."""
        return self.row.assigns_node_ranks(self.options)

    @property
    def start_seconds(self) -> float:
        """The longest wait for another rank until the first update is done."""
        return self.timeout_seconds if self.start_timeout_seconds is None else self.start_timeout_seconds

    @property
    def start_flag(self) -> str:
        """The word of the command line that says so."""
        return "--timeout" if self.start_timeout_seconds is None else "--start-timeout"

    @property
    def restarts_ranks(self) -> bool:
        """Whether all ranks are started again after a failure."""
        return self.row.restarts_ranks(self.options)

    @property
    def min_nodes(self) -> int | None:
        """With so few hosts it goes on, and takes new ones in; None where their number stays."""
        return self.row.min_nodes(self.options)

    @property
    def fewer_processes(self) -> range | None:
        """The numbers of ranks below `processes` with which it begins, or goes on; None where their number stays."""
        if self.min_nodes is not None:
            return range(self.min_nodes * self.processes_per_node, self.processes, self.processes_per_node)
        least = self.row.min_processes(self.options)
        return None if least is None else range(least, self.processes)

    @property
    def processes_per_node(self) -> int:
        """Ranks on each host."""
        return self.processes // self.nodes


def check_init_method(text: str) -> None:
    """Whether it is one of those that there are. Raises `UsageError`."""
    if text == "env":
        return
    kind, _, place = text.partition("://")
    if kind == "tcp":
        split_endpoint(place, "--init-method tcp://")
    elif kind != "file" or not place.startswith("/") or place.endswith("/"):
        raise UsageError(f"--init-method {text}: give env, tcp://HOST:PORT or file:///PATH")


def named_function(function: Callable[..., Any] | str) -> Callable[..., Any]:
    """A function, or the one that "module:name" stands for: so a process that only sends it need not import torch."""
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


@dataclass(frozen=True)
class Job:
    """What each process finds in its directory. The payload is opened after `sys_path` is in place.

    rendezvous_url  where the ranks meet; None: their launcher tells them
    pid_namespace   where the parent's process number means it: elsewhere the directory stands for the parent
    keeps_logs      whether the folder of the logs is one that was asked for
    threads         CPU threads of each process that the person has asked for
    preload         the module that a fork server imports before it forks the ranks
    is_restarted    whether what starts the ranks starts them again when they fail
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

    def function(self) -> Callable[..., Any]:
        """What to call. One that was given by name is imported here, not in the process that has sent it."""
        return named_function(pickle.loads(self.payload)[0])  # noqa: S301  (our own parent wrote it)

    def arguments(self) -> tuple[Any, ...]:
        """With what, after the rank info."""
        return pickle.loads(self.payload)[1]  # noqa: S301
