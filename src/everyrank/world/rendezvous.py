"""Opens the store that all ranks share, for each init method. A TCP store listens on loopback if that is enough."""

from __future__ import annotations

import contextlib
import datetime
import errno
import http.client
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import url2pathname

import torch.distributed as dist

from everyrank.errors import RankFailedError, UsageError, WorkloadError, describe
from everyrank.launch import Launch, RankInfo, find_launcher
from everyrank.launch.host_info import (
    addresses_of,
    boot_id,
    check_known,
    check_reachable,
    host_name,
    is_loopback,
    local_address_towards,
    port_refused,
    split_endpoint,
    usable_interfaces,
)

__all__ = ["Rendezvous", "ask_server", "open_store"]

_STORE_KEYS = (b"everyrank", b"refcount")  # everyrank's keys and torch's own, in the file of a FileStore


@dataclass(frozen=True)
class Rendezvous:
    """An open store.

    store     torch's store
    address   address of this machine on the route to rank 0; None on rank 0's machine, or where it is not known
    is_host   whether this rank hosts the store, and therefore has to leave last
    file      the file of a file:// method, to be removed by the last rank
    """

    store: dist.Store
    address: str | None
    is_host: bool
    file: Path | None = None


def open_store(info: RankInfo, launch: Launch) -> Rendezvous:
    """Open the store by `launch.init_method`, or else as the launcher has set it up.

    Raises `UsageError`, or `RankFailedError` after the timeout.
    """
    method, is_store_master = launch.init_method, info.is_store_master
    if method is not None and not isinstance(method, str):
        return _by_function(info, launch)
    if method == "env":
        method, is_store_master = _of_environment(os.environ, info)
    elif method is not None:
        is_store_master = info.rank == 0
    method = method or info.rendezvous_url
    if not method:
        raise UsageError(
            f"{info.started_by} started {info.size} ranks on several hosts without an address for the rendezvous: add "
            "--init-method tcp://HOST:PORT (HOST: that of rank 0), or set MASTER_ADDR and MASTER_PORT"
        )
    timeout = datetime.timedelta(seconds=launch.start_seconds)
    kind, _, address = method.partition("://")
    if kind == "file":
        if launch.init_method is None:  # the launcher's file, which it removes with the job
            return Rendezvous(dist.FileStore(url2pathname(address), info.size), None, is_host=False)
        return _by_file(Path(address), info, launch.start_seconds)
    if kind == "meet":
        return _by_address_in_file(Path(url2pathname(address)), info, timeout)
    if kind == "http":
        return _by_address_at_server(address, info, timeout)
    host, port = split_endpoint(address, "--init-method tcp://")
    is_alone = info.local_size == info.size
    launcher = find_launcher(info.started_by)
    if launcher is None or not launcher.allow_loopback(host):
        (check_known if is_alone else check_reachable)(host, "the rendezvous at")
    store = _tcp(host, port, is_store_master, timeout, is_alone)
    local_address = None if is_alone or info.rank == 0 else local_address_towards(host)
    return Rendezvous(store, local_address, is_store_master)


def _of_environment(environment: Mapping[str, str], info: RankInfo) -> tuple[str, bool]:
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if not address or not port:
        missing = "MASTER_ADDR" if not address else "MASTER_PORT"
        raise UsageError(
            f"--init-method env: {missing} is not set; MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 before the command, or "
            "--init-method tcp://127.0.0.1:29500"
        )
    method = f"tcp://{address}:{port}"
    # torchrun's agent, which sets these two, has already opened that store
    return method, info.rank == 0 if method != info.rendezvous_url else info.is_store_master


def _by_function(info: RankInfo, launch: Launch) -> Rendezvous:
    """Return a store from Python."""
    function: Any = launch.init_method
    try:
        store: Any = function(info.rank, info.size)
    except Exception as error:
        raise WorkloadError(f"init_method: {describe(error)}") from error
    if not isinstance(store, dist.Store):
        raise WorkloadError(f"init_method returned {type(store).__name__}; return a torch.distributed.Store")
    return Rendezvous(store, None, is_host=info.rank == 0)


def _by_file(path: Path, info: RankInfo, timeout_seconds: float) -> Rendezvous:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    if not path.parent.is_dir() or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"file://{path}: it cannot be written; give another path")
    with contextlib.suppress(OSError):
        content, age = path.read_bytes(), time.time() - path.stat().st_mtime
        if content and not any(name in content for name in _STORE_KEYS):
            raise UsageError(f"file://{path}: the file exists and is not a rendezvous file; give another path")
        if content and age > timeout_seconds:  # the ranks that wrote it no longer wait
            raise UsageError(
                f"file://{path}: a run {age:,.0f} s ago left that file behind; remove it, or give another name"
            )
    try:  # a store would retry to open it
        with path.open("ab"):
            pass
    except OSError as error:
        raise UsageError(f"file://{path}: {error.strerror}; give another path") from error
    return Rendezvous(dist.FileStore(str(path), info.size), None, info.rank == 0, path)


def _by_address_in_file(path: Path, info: RankInfo, timeout: datetime.timedelta) -> Rendezvous:
    """Rank 0 opens a store on a free port and writes its address to a file, so that no ports collide."""
    if info.rank == 0:
        store, row = _open_anywhere(info, timeout)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(row)
        partial.replace(path)
        return Rendezvous(store, None, is_host=True)
    deadline = time.monotonic() + timeout.total_seconds()
    while path not in path.parent.iterdir():  # network file systems cache `exists`
        if time.monotonic() > deadline:
            raise _no_address(timeout)
        time.sleep(0.02)
    row = json.loads(path.read_text())
    rendezvous = _connect(row, info, timeout)
    if rendezvous is None:
        tried = ", ".join(row["addresses"]) or "no address at all"
        problem = f"rank 0's host {row['host']} does not answer on port {row['port']} at {tried}"
        raise RankFailedError(f"{problem}: check for a firewall between the hosts")
    return rendezvous


def _by_address_at_server(server: str, info: RankInfo, timeout: datetime.timedelta) -> Rendezvous:
    """Like `_by_address_in_file`, with an HTTP key-value server, such as horovodrun's, instead of the file.

    The entry of an earlier command is skipped, because its store no longer answers.
    """
    if info.rank == 0:
        store, row = _open_anywhere(info, timeout)
        ask_server(server, "PUT", row)
        return Rendezvous(store, None, is_host=True)
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        text = ask_server(server, "GET")
        rendezvous = _connect(json.loads(text), info, timeout) if text else None
        if rendezvous is not None:
            return rendezvous
        time.sleep(0.02)
    raise _no_address(timeout)


def ask_server(server: str, method: str, text: str | None = None) -> str:
    """Write everyrank's entry on the server, or return it; "" if there is none."""
    host, port = split_endpoint(server, "the rendezvous at http://")
    try:
        connection = http.client.HTTPConnection(host, port, timeout=5.0)
        connection.request(method, "/everyrank/address", text)
        response = connection.getresponse()
        return response.read().decode() if response.status == 200 else ""
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise RankFailedError(f"the rendezvous at http://{server} does not answer: {reason}") from error


def _no_address(timeout: datetime.timedelta) -> RankFailedError:
    return RankFailedError(
        f"rank 0 did not publish the address of its store within {timeout.total_seconds():g} s (--timeout)"
    )


def _open_anywhere(info: RankInfo, timeout: datetime.timedelta) -> tuple[dist.Store, str]:
    """Open a store on a free port; return it, and as JSON what the other ranks need to connect."""
    is_alone = info.local_size == info.size
    addresses = [address for address in usable_interfaces().values() if not is_loopback(address)]
    addresses = [address for address in addresses if not address.startswith("fe80")]
    store = _tcp("" if not is_alone else "127.0.0.1", 0, True, timeout, is_alone)
    assert isinstance(store, dist.TCPStore)
    row = {"boot": boot_id(), "host": host_name(), "port": store.port, "addresses": addresses}
    return store, json.dumps(row)


def _connect(row: dict[str, Any], info: RankInfo, timeout: datetime.timedelta) -> Rendezvous | None:
    """Connect to rank 0's store. Returns None if none of its addresses answers."""
    is_here = row["boot"] == boot_id()  # a small Slurm may run several "hosts" on one machine
    for address in ["127.0.0.1"] if is_here else row["addresses"]:
        if _answers(address, row["port"]):
            store = _tcp(address, row["port"], False, timeout, info.local_size == info.size)
            return Rendezvous(store, None if is_here else local_address_towards(address), is_host=False)
    return None


def _answers(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=5.0):
            return True
    except OSError:
        return False


def _tcp(host: str, port: int, opens: bool, timeout: datetime.timedelta, is_alone: bool) -> dist.Store:
    """Open a TCPStore or connect to one. An empty `host` listens on every interface."""
    listening = _listen(host, port, is_alone) if opens else None
    if not opens:
        _wait_for(host, port, timeout.total_seconds())
    if listening is not None:
        bound, port = listening.getsockname()[:2]
        host = bound if host and bound not in ("0.0.0.0", "::") else "127.0.0.1"  # noqa: S104  (only compared, not bound)
    try:
        store = dist.TCPStore(
            host,
            port,
            is_master=opens,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listening.fileno() if listening is not None else None,
        )
    except RuntimeError as error:
        action = "open" if opens else "reach"
        reason = str(error).splitlines()[0]
        raise RankFailedError(f"cannot {action} the store of rank 0 at {host}:{port}: {reason}") from error
    if listening is not None:
        listening.detach()  # the store owns the socket now
    return store


def _wait_for(host: str, port: int, seconds: float) -> None:
    """Wait until the port is open. torch's client would retry only after longer and longer pauses."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=seconds).close()
        except ConnectionRefusedError:
            time.sleep(0.02)
        except OSError:  # torch's client raises the error
            return
        else:
            return


def _listen(host: str, port: int, is_alone: bool) -> socket.socket:
    """Listen at the address of `host`, and only on loopback where all ranks are on this host."""
    addresses = addresses_of(host) if host else []
    addresses.sort(key=lambda address: is_loopback(address) != is_alone)  # other hosts cannot reach loopback
    address = addresses[0] if addresses else ("127.0.0.1" if is_alone else "")
    listening = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listening.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or is_alone:
                raise
            listening.bind(("", port))  # behind NAT, other hosts use an address that no interface here has
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise UsageError(port_refused(host, port, error)) from error
    return listening
