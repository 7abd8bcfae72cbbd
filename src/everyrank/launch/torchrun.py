"""torchrun: PyTorch's own launcher starts the ranks of each host and numbers them in environment variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from everyrank.errors import UsageError
from everyrank.launch.host_info import addresses_of, local_address_towards, split_endpoint
from everyrank.launch.job import PYTHON, WORKER, Launch
from everyrank.launch.launcher import Launcher, LauncherOptions
from everyrank.launch.rank_info import RankInfo, rank_info_of_user
from everyrank.options import Argument

__all__ = ["LAUNCHER", "RENDEZVOUS_KINDS", "TorchrunOptions"]

RENDEZVOUS_KINDS = ("static", "c10d")
_MARKER = "TORCHELASTIC_RUN_ID"
# Torchrun drops a host after 5 missed heartbeats, one every 2 seconds (its default: 5). When the minimum of hosts has
# joined, it waits 10 seconds for more (its default: 30).
_HEARTBEAT_SECONDS, _MISSED_HEARTBEATS, _LAST_CALL_SECONDS = 2, 5, 10
_MEANINGS = {
    "RendezvousTimeoutError": "fewer than {hosts} hosts joined within {seconds} s ({flag}); type the command on each",
    "RendezvousClosedError": "the other hosts ended the job before this host had joined it",
    "RendezvousConnectionError": "no answer from {rendezvous} (--rendezvous): it cannot be reached, or has ended",
}
"""What torchrun's errors about the hosts mean. It prints them without their cause."""


@dataclass(frozen=True)
class TorchrunOptions(LauncherOptions):
    """Options of torchrun.

    rendezvous_kind  rendezvous backend between hosts: static or c10d
    min_nodes        with c10d: start with at least this many hosts, and continue with them when others are lost
    restarts         how often all ranks are started again after one failed
    """

    rendezvous_kind: Annotated[
        str, Argument(f"torchrun: rendezvous backend between hosts, {' or '.join(RENDEZVOUS_KINDS)}", "R")
    ] = "static"
    min_nodes: int | None = None
    restarts: Annotated[int, Argument("torchrun, ray: start all ranks again up to K times", "K")] = 0

    @property
    def restarts_ranks(self) -> bool:
        """Whether torchrun starts all ranks again, after a failure or when the number of hosts changes."""
        return self.restarts > 0 or self.min_nodes is not None

    @property
    def is_elastic(self) -> bool:
        """Whether hosts may join a running job: additional ones, or a replacement for a lost one."""
        return self.assigns_node_ranks and self.restarts_ranks

    @property
    def assigns_node_ranks(self) -> bool:
        """Whether torchrun numbers the hosts, as its c10d rendezvous does."""
        return self.rendezvous_kind == "c10d"

    @property
    def variables(self) -> Mapping[str, str]:
        """The variable that gives each restart its own store.

        By default torchrun reuses the store of the first start. Hosts that join later do not get its address, and would
        wait forever.
        """
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.is_elastic else {}


class Torchrun(Launcher):
    """One torchrun on each host."""

    name = "torchrun"
    program = "torchrun"
    options = TorchrunOptions
    accepts_arguments = True
    supports_nodes = True
    launch_per_node = True
    terminates_on_failure = True
    provides_rendezvous = True
    nesting_level = 5
    rank_variables = (("RANK",),)
    marker_variable = _MARKER

    def commands(self, launch: Launch, job_folder: Path) -> list[list[str]]:
        """Return the torchrun command of this host."""
        options: TorchrunOptions = launch.options
        command = [*PYTHON, "-m", "torch.distributed.run", *_rendezvous(launch)]
        command += [f"--nproc-per-node={launch.processes_per_node}"]
        command += [f"--max-restarts={options.restarts}"] if options.restarts else []
        # By default torchrun leaves a log folder in /tmp, and runs Python without -P.
        command += [f"--log-dir={job_folder}", *launch.arguments, "--no-python"]
        return [[*command, *WORKER, str(job_folder)]]

    def find(self) -> str:
        """Always available: it is a module of torch."""
        return "starts in this Python"

    def check(self, launch: Launch) -> None:
        """Check the options."""
        options: TorchrunOptions = launch.options
        if options.rendezvous_kind not in RENDEZVOUS_KINDS:
            raise UsageError(f"--rendezvous-kind {options.rendezvous_kind}: give {' or '.join(RENDEZVOUS_KINDS)}")
        if options.min_nodes is not None and not options.assigns_node_ranks:
            raise UsageError(
                "--nodes MIN:MAX: torchrun continues with fewer hosts only with the c10d rendezvous; "
                "add --rendezvous-kind c10d"
            )
        if options.min_nodes is not None and not 1 <= options.min_nodes <= launch.nodes:
            raise UsageError(f"--nodes {options.min_nodes}:{launch.nodes}: give MIN:MAX with 1 <= MIN <= MAX")
        if options.restarts < 0:
            raise UsageError(f"--restarts {options.restarts}: give 0 or more")

    def rank_info(self, environment: Mapping[str, str]) -> RankInfo | None:
        """Read RANK, WORLD_SIZE and so on only if the run id of torchrun is set: users may set RANK themselves."""
        info = rank_info_of_user(environment) if _MARKER in environment else None
        return dataclasses.replace(info, started_by=self.name) if info is not None else None

    def explain(self, last_line: str, launch: Launch) -> str:
        """Return what an error of the rendezvous means; another line as it is."""
        name = last_line.partition(":")[0].rpartition(".")[2]
        if name not in _MEANINGS:
            return last_line
        hosts = launch.nodes if launch.min_nodes is None else launch.min_nodes
        return _MEANINGS[name].format(
            hosts=hosts, seconds=_join_seconds(launch), flag=launch.start_flag, rendezvous=launch.rendezvous
        )

    def allow_loopback(self, host: str) -> bool:
        """Return True: the agent of torchrun has already opened a store on every interface."""
        del host
        return True


def _rendezvous(launch: Launch) -> list[str]:
    """Return the rendezvous arguments. On one host torchrun picks a port; its store listens on every interface."""
    if launch.nodes == 1:
        return ["--standalone"]
    assert launch.rendezvous is not None
    options: TorchrunOptions = launch.options
    host, port = split_endpoint(launch.rendezvous, "--rendezvous")
    if not options.assigns_node_ranks:
        return [
            f"--nnodes={launch.nodes}",
            f"--node-rank={launch.node_rank}",
            f"--master-addr={host}",
            f"--master-port={port}",
        ]
    min_nodes = f"{options.min_nodes}:" if options.min_nodes is not None else ""
    local_address = local_address_towards(host)
    # Torchrun decides by comparing host names whether this host opens the store, and is often wrong: then all hosts
    # wait for each other for a minute.
    is_host = local_address is not None and local_address in (host, *addresses_of(host))
    arguments = [
        f"--nnodes={min_nodes}{launch.nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={launch.rendezvous}",
        "--rdzv-id=everyrank",
        f"--rdzv-conf=is_host={int(is_host)},{_timeouts(launch)}",
    ]
    return arguments + ([f"--local-addr={local_address}"] if local_address is not None else [])


def _join_seconds(launch: Launch) -> int:
    """Return how long hosts wait for each other. An elastic job adds the time to notice that a host was lost."""
    noticing_seconds = _HEARTBEAT_SECONDS * _MISSED_HEARTBEATS + _LAST_CALL_SECONDS
    return max(1, int(launch.start_seconds)) + noticing_seconds * launch.options.is_elastic


def _timeouts(launch: Launch) -> str:
    """Return the settings of the rendezvous."""
    if not launch.options.is_elastic:
        return f"join_timeout={_join_seconds(launch)}"
    return (
        f"join_timeout={_join_seconds(launch)},last_call_timeout={_LAST_CALL_SECONDS},"
        f"keep_alive_interval={_HEARTBEAT_SECONDS},keep_alive_max_attempt={_MISSED_HEARTBEATS}"
    )


LAUNCHER = Torchrun()
