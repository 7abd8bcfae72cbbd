"""rank_variables: torchrun's environment variables, for a rank of any launcher.

torchrun opens the store of the ranks. Under other launchers, rank 0 opens it when the script calls
`init_process_group`. Until then rank 0 keeps its port reserved, and publishes it in a file of the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import url2pathname

from everyrank.errors import RankFailedError
from everyrank.launch import RankInfo
from everyrank.launch.host_info import boot_id, is_loopback, split_endpoint, usable_interfaces
from everyrank.launch.launcher import find_launcher

__all__ = ["rank_variables"]

_FIRST_PORT, _LAST_PORT = 12_000, 31_999  # below the ports of outgoing connections
_RESERVED: list[socket.socket] = []


def rank_variables(info: RankInfo, timeout_seconds: float) -> dict[str, str]:
    """Return RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and the other variables of torchrun for this rank.

    Waits for the address of rank 0, and raises `RankFailedError` after `timeout_seconds`.
    """
    node, nodes = _node(info, os.environ)
    variables = {
        "RANK": info.rank,
        "LOCAL_RANK": info.local_rank,
        "WORLD_SIZE": info.size,
        "LOCAL_WORLD_SIZE": info.local_size,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": nodes,
        "ROLE_RANK": info.rank,
        "ROLE_WORLD_SIZE": info.size,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": info.restart_count,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "everyrank",
        "TORCHELASTIC_USE_AGENT_STORE": False,
    }
    host, port = _master(info, os.environ, timeout_seconds)
    texts = {name: str(value) for name, value in variables.items()}
    return {**texts, "MASTER_ADDR": host, "MASTER_PORT": str(port)}


def _node(info: RankInfo, environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of this host, and the number of hosts, as the launcher has them.

    Otherwise hosts are taken to have the same number of ranks, in order.
    """
    launcher = find_launcher(info.started_by)
    names = launcher.node_variables if launcher is not None else None
    if names is not None and all(environment.get(name, "").isdecimal() for name in names):
        return int(environment[names[0]]), int(environment[names[1]])
    return info.rank // info.local_size, -(-info.size // info.local_size)


def _master(info: RankInfo, environment: Mapping[str, str], timeout_seconds: float) -> tuple[str, int]:
    """Return the address of rank 0's store."""
    kind, _, location = info.rendezvous_url.partition("://")
    if kind == "tcp":
        return split_endpoint(location, "the rendezvous at")
    if kind == "http":  # the server of horovodrun
        row = _through_server(info, location, timeout_seconds)
    elif kind in ("file", "meet"):
        path = Path(url2pathname(location))
        row = _through_file(info, path.with_name(f"{path.name}.address"), timeout_seconds)
    elif environment.get("MASTER_ADDR") and environment.get("MASTER_PORT"):
        return environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    else:
        raise RankFailedError(
            f"{info.started_by} started {info.size} ranks on several hosts, but no common address is set: set "
            "MASTER_ADDR and MASTER_PORT"
        )
    is_here, addresses = row["boot"] == boot_id(), row["addresses"]
    if is_here and (info.local_size == info.size or not addresses):
        return "127.0.0.1", row["port"]
    if not addresses:
        raise RankFailedError(
            "the host of rank 0 has no network interface that other hosts can reach: start it with one (a container: "
            "with the network of its host), or start all ranks on one host"
        )
    return addresses[0], row["port"]


def _through_file(info: RankInfo, path: Path, timeout_seconds: float) -> dict[str, Any]:
    """Return rank 0's address from a file. Waits for a new one if this rank has read the file in an earlier start.

    Ranks of mpirun or srun may run several scripts, one after the other, and have the same file for all of them.
    """
    if info.rank == 0:
        row = _reserve_port()
        _delete_old(path.parent)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(row))
        partial.replace(path)
        return row
    read_before = path.with_name(f"{path.name}.{info.rank}")
    text_before = read_before.read_text() if read_before.exists() else None
    deadline = time.monotonic() + timeout_seconds
    # network file systems cache `exists`
    while path not in path.parent.iterdir() or (text := path.read_text()) == text_before:
        if time.monotonic() > deadline:
            raise RankFailedError(f"rank 0 did not publish its address within {timeout_seconds:g} s (--timeout)")
        time.sleep(0.02)
    with contextlib.suppress(OSError):  # the disk may be full
        read_before.write_text(text)
    return json.loads(text)


def _delete_old(folder: Path) -> None:
    """Delete addresses of ranks that started more than a day ago."""
    a_day_ago = time.time() - 86_400
    for path in folder.glob("*.address*"):
        with contextlib.suppress(OSError):  # another rank 0 may delete it, too
            if path.stat().st_mtime < a_day_ago:
                path.unlink()


def _through_server(info: RankInfo, server: str, timeout_seconds: float) -> dict[str, Any]:
    """Return rank 0's address from the key-value server of horovodrun."""
    from everyrank.world.rendezvous import ask_server

    if info.rank == 0:
        row = _reserve_port()
        ask_server(server, "PUT", json.dumps(row))
        return row
    deadline = time.monotonic() + timeout_seconds
    while not (text := ask_server(server, "GET")):
        if time.monotonic() > deadline:
            raise RankFailedError(f"rank 0 did not publish its address within {timeout_seconds:g} s (--timeout)")
        time.sleep(0.05)
    return json.loads(text)


def _reserve_port() -> dict[str, Any]:
    """Reserve a free port that torch's store, which allows address reuse, can open. Returns it with the addresses here.

    The socket does not listen, and also allows address reuse. The time tells two starts with the same port apart.
    """
    for _ in range(100):
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            reserved.bind(("", random.SystemRandom().randint(_FIRST_PORT, _LAST_PORT)))
        except OSError:
            reserved.close()
            continue
        _RESERVED.append(reserved)
        addresses = [address for address in usable_interfaces().values() if not is_loopback(address)]
        addresses = [address for address in addresses if not address.startswith("fe80")]
        port = reserved.getsockname()[1]
        return {"boot": boot_id(), "port": port, "addresses": addresses, "time": time.time_ns()}
    raise RankFailedError(f"no port from {_FIRST_PORT} to {_LAST_PORT} is free on this host")
