"""torchrun: PyTorch's own launcher starts the ranks of each host, and tells them their facts in the environment."""

from __future__ import annotations

from pathlib import Path

from everyrank.launch.hosts import addresses_of, local_address_towards, split_endpoint
from everyrank.launch.job import Launch
from everyrank.launch.spawn import PYTHON, WORKER

__all__ = ["render"]


def render(launch: Launch, directory: Path) -> list[list[str]]:
    """One argv for this host."""
    command = [*PYTHON, "-m", "torch.distributed.run", *_meeting(launch)]
    command += [f"--nproc-per-node={launch.processes_per_node}"]
    command += [f"--max-restarts={launch.restarts}"] if launch.restarts else []
    # a folder of its own would stay behind in /tmp, and its own choice of Python would be without -P
    return [[*command, f"--log-dir={directory}", *launch.arguments, "--no-python", *WORKER, str(directory)]]


def _meeting(launch: Launch) -> list[str]:
    """One host: a port of torchrun's own choosing, whose store, unlike all else, is open on every interface."""
    if launch.nodes == 1:
        return ["--standalone"]
    assert launch.rendezvous is not None
    host, port = split_endpoint(launch.rendezvous, "--rendezvous")
    if launch.rendezvous_kind == "static":
        return [
            f"--nnodes={launch.nodes}",
            f"--node-rank={launch.node_rank}",
            f"--master-addr={host}",
            f"--master-port={port}",
        ]
    least = f"{launch.min_nodes}:" if launch.min_nodes is not None else ""
    own = local_address_towards(host)
    words = [
        f"--nnodes={least}{launch.nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={launch.rendezvous}",
        "--rdzv-id=everyrank",
        # torchrun compares host names to find out whether it is the one to open the store, and often errs: both
        # sides then wait for the other for a minute
        f"--rdzv-conf=is_host={int(own is not None and own in (host, *addresses_of(host)))},"
        f"join_timeout={max(1, int(launch.timeout_seconds))}",
    ]
    return words + ([f"--local-addr={own}"] if own is not None else [])
