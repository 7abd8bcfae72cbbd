"""torchrun: PyTorch's own launcher starts the ranks of each host, and tells them their place in the environment."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyrank.errors import UsageError
from everyrank.launch.hosts import addresses_of, local_address_towards, split_endpoint
from everyrank.launch.job import PYTHON, WORKER, Launch
from everyrank.launch.launcher import Environment, Launcher
from everyrank.launch.rank_info import RankInfo
from everyrank.launch.variables import rank_info_of_person

__all__ = ["LAUNCHER", "RENDEZVOUS_KINDS", "TorchrunOptions", "render"]

RENDEZVOUS_KINDS = ("static", "c10d")
_PROGRAM = (*PYTHON, "-m", "torch.distributed.run")
_MARKER = "TORCHELASTIC_RUN_ID"
# A host that says nothing for so long is taken for dead (seconds between two signs, how many may be missing), and once
# the fewest hosts are there, others may come for so long. Torch's own: 15 and 30 seconds.
_ALIVE_SECONDS, _ALIVE_SIGNS, _LAST_CALL_SECONDS = 2, 5, 10
# Torchrun keeps the store of its first start for all others, and does not tell hosts that join later where it is: they
# would wait for ever. So each start gets a store of its own.
_OWN_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(frozen=True)
class TorchrunOptions:
    """torchrun's own options.

    rendezvous_kind  its backend where hosts meet: static or c10d
    min_nodes        with c10d: begin with as few hosts, and go on when some are lost
    restarts         how often all ranks are started again after one failed
    """

    rendezvous_kind: str = "static"
    min_nodes: int | None = None
    restarts: int = 0


def render(launch: Launch, directory: Path) -> list[list[str]]:
    """One argv for this host."""
    options: TorchrunOptions = launch.options
    command = [*_PROGRAM, *_rendezvous(launch, options)]
    command += [f"--nproc-per-node={launch.processes_per_node}"]
    command += [f"--max-restarts={options.restarts}"] if options.restarts else []
    # a folder of its own would stay behind in /tmp, and its own choice of Python would be without -P
    return [[*command, f"--log-dir={directory}", *launch.arguments, "--no-python", *WORKER, str(directory)]]


def _rendezvous(launch: Launch, options: TorchrunOptions) -> list[str]:
    """One host: a port of torchrun's own choosing, whose store, unlike all else, is open on every interface."""
    if launch.nodes == 1:
        return ["--standalone"]
    assert launch.rendezvous is not None
    host, port = split_endpoint(launch.rendezvous, "--rendezvous")
    if options.rendezvous_kind == "static":
        return _static(launch.nodes, launch.node_rank, host, port)
    least = f"{options.min_nodes}:" if options.min_nodes is not None else ""
    own = local_address_towards(host)
    words = [
        f"--nnodes={least}{launch.nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={launch.rendezvous}",
        "--rdzv-id=everyrank",
        # torchrun compares host names to find out whether it is the one to open the store, and often errs: both
        # sides then wait for the other for a minute
        f"--rdzv-conf=is_host={int(own is not None and own in (host, *addresses_of(host)))},{_waits(launch, options)}",
    ]
    return words + ([f"--local-addr={own}"] if own is not None else [])


def _waits(launch: Launch, options: TorchrunOptions) -> str:
    """How long hosts wait for each other: of a job that goes on, until all have noticed that one was lost."""
    seconds = max(1, int(launch.start_seconds))
    if not _is_elastic(options):
        return f"join_timeout={seconds}"
    seconds += _ALIVE_SECONDS * _ALIVE_SIGNS + _LAST_CALL_SECONDS
    return (
        f"join_timeout={seconds},last_call_timeout={_LAST_CALL_SECONDS},"
        f"keep_alive_interval={_ALIVE_SECONDS},keep_alive_max_attempt={_ALIVE_SIGNS}"
    )


def _is_elastic(options: TorchrunOptions) -> bool:
    """Whether hosts may come while others train: more than began it, or one in the place of a lost one."""
    return options.rendezvous_kind == "c10d" and _restarts_ranks(options)


def _static(nodes: int, node_rank: int | None, host: str, port: int) -> list[str]:
    return [f"--nnodes={nodes}", f"--node-rank={node_rank}", f"--master-addr={host}", f"--master-port={port}"]


def _render_on_node(task: RankInfo, count: int, directory: str) -> list[list[str]]:
    words = ["--standalone"]
    if task.size > 1:
        words = _static(task.size, task.rank, *split_endpoint(task.rendezvous_url.removeprefix("tcp://"), "torchrun"))
    words += [f"--nproc-per-node={count}", f"--log-dir={directory}", "--no-python", *WORKER, directory]
    return [[*_PROGRAM, *words]]


def _check(launch: Launch) -> None:
    options: TorchrunOptions = launch.options
    _check_kind(options)
    if options.min_nodes is not None:
        if options.rendezvous_kind != "c10d":
            raise UsageError(_MIN_NODES)
        if not 1 <= options.min_nodes <= launch.nodes:
            raise UsageError(f"--nodes {options.min_nodes}:{launch.nodes}: give MIN:MAX, from 1 on")
    if options.restarts < 0:
        raise UsageError(_RESTARTS.format(options.restarts))


def _check_kind(options: TorchrunOptions) -> None:
    if options.rendezvous_kind not in RENDEZVOUS_KINDS:
        raise UsageError(f"--rendezvous-kind {options.rendezvous_kind}: give {' or '.join(RENDEZVOUS_KINDS)}")


_MIN_NODES = "--nodes MIN:MAX: --launcher torchrun --rendezvous-kind c10d alone goes on with fewer hosts"
_RESTARTS = "--restarts {}: give 0 or more"


def _add_arguments(group: Any) -> None:
    kinds = " or ".join(RENDEZVOUS_KINDS)
    group.add_argument("--rendezvous-kind", default="static", metavar="R", help=f"torchrun's, between hosts: {kinds}")
    group.add_argument(
        "--restarts", type=int, default=0, metavar="K", help="torchrun, ray: start all ranks again so often"
    )


def _read_options(args: argparse.Namespace, is_chosen: bool) -> TorchrunOptions:
    options = TorchrunOptions(args.rendezvous_kind, args.min_nodes, args.restarts)
    if is_chosen:
        return options
    _check_kind(options)
    if options.rendezvous_kind == "c10d":
        raise UsageError("--rendezvous-kind c10d: it is torchrun's; give --launcher torchrun too")
    return options


def _read(environment: Mapping[str, str]) -> RankInfo | None:
    info = rank_info_of_person(environment) if _MARKER in environment else None
    return dataclasses.replace(info, started_by="torchrun") if info is not None else None


def _restarts_ranks(options: TorchrunOptions) -> bool:
    return options.restarts > 0 or options.min_nodes is not None


LAUNCHER = Launcher(
    name="torchrun",
    render=render,
    find=lambda: "starts in this Python",
    check=_check,
    render_on_node=_render_on_node,
    options=TorchrunOptions,
    add_arguments=_add_arguments,
    read_options=_read_options,
    one_command_per_host=True,
    assigns_node_ranks=lambda options: options.rendezvous_kind == "c10d",
    restarts_ranks=_restarts_ranks,
    min_nodes=lambda options: options.min_nodes,
    limits_start=_is_elastic,
    variables=lambda options: _OWN_STORES if _is_elastic(options) else {},
    terminates_ranks=True,
    has_own_rendezvous=True,
    trusts_address=lambda _: True,  # its agent has opened a store there, on every interface
    environment=Environment(
        program="torchrun",
        depth=5,
        rank_variables=("RANK",),
        read=_read,
        marker=_MARKER,
        sets_threads=True,
    ),
)
