"""What is started: how (`Launch`), and what runs in each process (`Job`)."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyrank.errors import UsageError
from everyrank.launch.hosts import split_endpoint

__all__ = ["LAUNCHERS", "RENDEZVOUS", "Job", "Launch", "Named"]

LAUNCHERS = ("spawn", "torchrun", "slurm", "mpi", "ray")
RENDEZVOUS = ("static", "c10d")
_MOST_PROCESSES, _MOST_ON_A_HOST = 1_000_000, 4_096  # more is a slip of the hand: there is no such machine
_LONGEST_TIMEOUT = 10_000_000  # four months; clocks of 32 bits end not far behind


@dataclass(frozen=True)
class Launch:
    """How processes start.

    launcher         spawn, torchrun, slurm, mpi or ray
    processes        ranks in all, on all hosts
    device           cpu or cuda; None: cuda where there is one
    backend          gloo or nccl; None: chosen by `world.choose_backend`
    loader_workers   data loader processes of each rank; 0 loads in the rank itself
    timeout_seconds  longest wait for another rank, at start, in a collective and at the end
    logs             folder for the ranks' logs; None: a temporary one, kept only after a failure
    nodes            hosts; each has processes // nodes ranks
    min_nodes        torchrun alone: begin with as few, and go on when some are lost
    node_rank        which of them this is (spawn and torchrun, where this is typed on each host)
    rendezvous       HOST:PORT where hosts meet that no scheduler has brought together
    rendezvous_kind  torchrun's backend: static or c10d
    restarts         torchrun alone: how often all ranks are started again after one failed
    per_node         slurm alone: one task on each node, and in it `spawn` or `torchrun`; None: one task for each rank
    init_method      env, tcp://host:port, file:///path, or (rank, size) -> a store; None: what suits the launcher
    interface        the network interface between hosts; None: the one that leads to where the ranks meet
    address          ray alone: of its cluster; None: one of this machine, started for the run
    arguments        further words for mpirun, srun or torchrun

    Raises `UsageError` for a value that cannot be meant.
    """

    launcher: str = "spawn"
    processes: int = 1
    device: str | None = None
    backend: str | None = None
    loader_workers: int = 0
    timeout_seconds: float = 300.0
    logs: Path | None = None
    nodes: int = 1
    min_nodes: int | None = None
    node_rank: int | None = None
    rendezvous: str | None = None
    rendezvous_kind: str = "static"
    restarts: int = 0
    per_node: str | None = None
    init_method: str | Callable[[int, int], Any] | None = None
    interface: str | None = None
    address: str | None = None
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.launcher not in LAUNCHERS:
            raise UsageError(f"--launcher {self.launcher}: give one of {', '.join(LAUNCHERS)}")
        if self.processes < 1:
            raise UsageError(f"--processes {self.processes}: give at least 1")
        if self.processes > _MOST_PROCESSES:
            raise UsageError(
                f"--processes {self.processes}: no machine has so many ranks; give at most {_MOST_PROCESSES:,}"
            )
        if self.device not in (None, "cpu", "cuda"):
            raise UsageError(f"--device {self.device}: give cpu or cuda")
        if self.backend not in (None, "gloo", "nccl"):
            raise UsageError(f"--backend {self.backend}: give gloo or nccl")
        if self.loader_workers < 0:
            raise UsageError(f"--workers {self.loader_workers}: give 0 or more")
        if not 0 < self.timeout_seconds <= _LONGEST_TIMEOUT:
            raise UsageError(
                f"--timeout {self.timeout_seconds:g}: give more than 0 seconds, and at most {_LONGEST_TIMEOUT:,}"
            )
        self._check_nodes()
        self._check_words_of_one_launcher()
        if isinstance(self.init_method, str):
            check_init_method(self.init_method)

    def _check_nodes(self) -> None:
        if self.nodes < 1:
            raise UsageError(f"--nodes {self.nodes}: give at least 1")
        if self.processes % self.nodes:
            raise UsageError(
                f"--processes {self.processes} --nodes {self.nodes}: each node has as many ranks as the others"
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
        if self.rendezvous_kind not in RENDEZVOUS:
            raise UsageError(f"--rendezvous-kind {self.rendezvous_kind}: give {' or '.join(RENDEZVOUS)}")
        if self.rendezvous_kind == "c10d" and self.launcher != "torchrun":
            raise UsageError("--rendezvous-kind c10d: it is torchrun's; give --launcher torchrun too")
        if self.nodes > 1 and self.launcher == "ray":
            raise UsageError(f"--nodes {self.nodes}: Ray chooses the hosts itself; leave it out")
        if self.launcher in ("spawn", "torchrun") and self.nodes > 1:
            if self.rendezvous is None:
                raise UsageError(
                    f"--nodes {self.nodes}: where do they meet? --rendezvous HOST:PORT, HOST that of node 0"
                )
            if self.node_rank is None and not self.finds_its_place:
                raise UsageError(f"--nodes {self.nodes}: which of them is this? --node-rank 0 to {self.nodes - 1}")

    def _check_words_of_one_launcher(self) -> None:
        if self.min_nodes is not None:
            if self.launcher != "torchrun" or self.rendezvous_kind != "c10d":
                raise UsageError(
                    "--nodes MIN:MAX: --launcher torchrun --rendezvous-kind c10d alone goes on with fewer hosts"
                )
            if not 1 <= self.min_nodes <= self.nodes:
                raise UsageError(f"--nodes {self.min_nodes}:{self.nodes}: give MIN:MAX, from 1 on")
        if self.restarts < 0 or (self.restarts and self.launcher != "torchrun"):
            raise UsageError(f"--restarts {self.restarts}: give 0 or more, with --launcher torchrun")
        if self.per_node not in (None, "spawn", "torchrun") or (self.per_node and self.launcher != "slurm"):
            raise UsageError(f"--per-node {self.per_node}: give spawn or torchrun, with --launcher slurm")
        if self.address is not None and self.launcher != "ray":
            raise UsageError(f"--address {self.address}: it is that of a Ray cluster; give --launcher ray too")
        if self.arguments and self.launcher in ("spawn", "ray"):
            raise UsageError(f"--launcher-args {' '.join(self.arguments)}: {self.launcher} takes none")

    @property
    def finds_its_place(self) -> bool:
        """Whether a host need not be told which one it is."""
        return self.launcher == "torchrun" and self.rendezvous_kind == "c10d"

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


@dataclass(frozen=True)
class Named:
    """A function by its name, imported where it is called: the caller's own process needs no torch.

    `Named("everyrank.tasks.train:train_rank")(facts, ...)`.
    """

    target: str

    def __call__(self, *arguments: Any) -> Any:
        """Import it and call it."""
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)(*arguments)


@dataclass(frozen=True)
class Job:
    """What each process finds in its directory. The payload is opened after `sys_path` is in place.

    rendezvous   where the ranks meet; None: their launcher tells them
    space        where the parent's process number means it: elsewhere the directory stands for the parent
    keeps_logs   whether the folder of the logs is one that was asked for
    threads      CPU threads of each process that the person has asked for
    """

    payload: bytes
    sys_path: list[str]
    launcher: str
    processes: int
    rendezvous: str | None
    space: str
    parent_pid: int
    logs: Path
    keeps_logs: bool
    threads: int | None = None

    def function(self) -> Callable[..., Any]:
        """What to call."""
        return pickle.loads(self.payload)[0]  # noqa: S301  (our own parent wrote it)

    def arguments(self) -> tuple[Any, ...]:
        """With what, after the rank facts."""
        return pickle.loads(self.payload)[1]  # noqa: S301
