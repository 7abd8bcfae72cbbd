"""Starts Horovod next to torch.distributed, with the same ranks, once in a world. It ends with the world.

Horovod has its own rendezvous: each rank reads its numbers from environment variables, and the addresses of the others
from a server over HTTP. horovodrun provides both. Under any other launcher the variables follow from the world, and
rank 0 runs that server until the ranks are connected: on loopback, or with several hosts at the address of the
interface that they already use.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import math
import os
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

from everyrank.errors import CannotRunError, RankFailedError, UsageError, describe
from everyrank.launch.host_info import LOOPBACK, usable_interfaces
from everyrank.world.barrier import broadcast_text, store_barrier
from everyrank.world.world import World

__all__ = ["horovod_numbers", "import_horovod", "start_horovod", "wait_for_horovod"]

_PAUSE_SECONDS = 1e-4  # between two polls; Horovod's own thread polls every millisecond
_STARTS = itertools.count()  # numbers the starts, the same on all ranks
_NUMBERS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")


def import_horovod() -> Any:
    """Import `horovod.torch`. Raises `CannotRunError` if it is not installed or does not load."""
    try:
        return importlib.import_module("horovod.torch")
    except ImportError as error:
        if error.name in ("horovod", "horovod.torch"):
            reason = "Horovod is not installed"
        else:  # for example built for a different torch
            reason = f"Horovod does not load ({describe(error).splitlines()[0]})"
        raise CannotRunError(
            f"{reason}; build 0.28.1 for this torch (docs/horovod.md), or use layout ddp, or another --backend"
        ) from error


def start_horovod(world: World) -> Any:
    """Call `hvd.init()` with the ranks of the world and return `horovod.torch`. A collective of all ranks.

    Raises `CannotRunError` without Horovod, `UsageError` if its ranks are not those of the world, and
    `RankFailedError` if they do not connect within the timeout.
    """
    hvd = import_horovod()
    if "horovod" in world.group_cache.at_end:
        return hvd
    is_horovodrun = os.environ.get("HOROVOD_RANK") is not None
    if is_horovodrun:
        _check_horovodrun_numbers(os.environ, world)
    variables = {} if is_horovodrun else _world_variables(world)
    key = f"horovod/{next(_STARTS)}"
    with _rendezvous(world, key, is_horovodrun) as server, _in_environment({**variables, **server}):
        try:
            hvd.init()
        except ValueError as error:
            raise RankFailedError(
                f"Horovod: its ranks did not connect within {world.timeout_seconds:g} s (--timeout)"
            ) from error
        store_barrier(world, key)  # rank 0 must not close the server before all have connected
    _check_same_ranks(world, hvd.rank(), hvd.size())
    world.group_cache.at_end["horovod"] = hvd.shutdown
    return hvd


def horovod_numbers(hosts: Sequence[str]) -> list[dict[str, str]]:
    """Return Horovod's numbers of each rank, by rank, as environment variables without their prefix.

    hosts   the name of each rank's host

    LOCAL_RANK counts the ranks of a host. CROSS_RANK counts the hosts that have this local rank.
    """
    local_ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        local_ranks.setdefault(host, []).append(rank)
    numbers: dict[int, dict[str, str]] = {}
    for host, ranks in local_ranks.items():
        for local_rank, rank in enumerate(ranks):
            peers = [name for name, ranks_of_host in local_ranks.items() if len(ranks_of_host) > local_rank]
            values = (rank, len(hosts), local_rank, len(ranks), peers.index(host), len(peers), host)
            numbers[rank] = dict(zip(_NUMBERS, map(str, values), strict=True))
    return [numbers[rank] for rank in range(len(hosts))]


def wait_for_horovod(hvd: Any, handles: Iterable[int], world: World) -> None:
    """Wait until these operations of Horovod are done. Raises `RankFailedError` after the timeout.

    `hvd.synchronize` has no timeout: in 0.28.1 the stall check never fires under the gloo controller, because its list
    of ranks is empty (gloo_controller.cc: reserved, not resized).
    """
    deadline = time.monotonic() + world.timeout_seconds
    for handle in handles:
        while not hvd.poll(handle):
            if time.monotonic() > deadline:
                raise RankFailedError(f"Horovod: not all ranks joined within {world.timeout_seconds:g} s (--timeout)")
            time.sleep(_PAUSE_SECONDS)


def _world_variables(world: World) -> dict[str, str]:
    numbers = horovod_numbers(world.hosts or ["localhost"] * world.size)[world.rank]
    variables = {f"HOROVOD_{name}": value for name, value in numbers.items()}
    defaults = {  # the user's settings take precedence
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(math.ceil(world.timeout_seconds)),
        "HOROVOD_LOG_LEVEL": "fatal",  # its C++ code raises what it logs
    }
    return variables | {name: value for name, value in defaults.items() if name not in os.environ}


def _check_horovodrun_numbers(environment: Mapping[str, str], world: World) -> None:
    """Raise `UsageError` unless horovodrun's rank and size are those of the world."""
    try:
        rank, size = (int(environment[name]) for name in ("HOROVOD_RANK", "HOROVOD_SIZE"))
    except (KeyError, ValueError) as error:
        raise UsageError("HOROVOD_RANK is set without HOROVOD_SIZE; unset HOROVOD_RANK") from error
    _check_same_ranks(world, rank, size)


def _check_same_ranks(world: World, rank: int, size: int) -> None:
    """Raise `UsageError` for different ranks: gradients would be summed over other ranks than the loss terms."""
    if (rank, size) != (world.rank, world.size):
        raise UsageError(
            f"Horovod's rank is {rank} of {size}, and this is rank {world.rank} of {world.size}: "
            "start all ranks with horovodrun only, or unset HOROVOD_RANK"
        )


@contextlib.contextmanager
def _rendezvous(world: World, key: str, is_horovodrun: bool) -> Generator[dict[str, str]]:
    """Run the rendezvous server while the ranks connect; yield its address as variables, none under horovodrun."""
    if is_horovodrun or world.size == 1:
        yield {}
        return
    is_one_host = len(set(world.hosts)) <= 1
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    interface = interface or (LOOPBACK if is_one_host else "")
    variables = {"HOROVOD_GLOO_IFACE": interface} if interface else {}
    with contextlib.ExitStack() as closing:
        text = None
        if world.rank == 0:
            address = "127.0.0.1" if is_one_host else usable_interfaces().get(interface, "")
            if not address:
                raise UsageError("Horovod: the interface to the other hosts is not known. Add --interface NAME")
            text = json.dumps([address, closing.enter_context(_server(address, horovod_numbers(world.hosts)))])
        address, port = json.loads(broadcast_text(world, key, text))
        yield {**variables, "HOROVOD_GLOO_RENDEZVOUS_ADDR": address, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}


@contextlib.contextmanager
def _server(address: str, numbers: Sequence[Mapping[str, str]]) -> Generator[int]:
    """Run Horovod's rendezvous server at `address`, on a free port; yield the port."""
    http: Any = importlib.import_module("horovod.runner.http.http_server")
    server = http.RendezvousHTTPServer((address, 0), http.RendezvousHandler, 0)
    slot_info: Any = importlib.import_module("horovod.runner.common.util.hosts").SlotInfo
    values = [{name: row[name] if name == "HOSTNAME" else int(row[name]) for name in _NUMBERS} for row in numbers]
    server.init([slot_info(**{name.lower(): value for name, value in row.items()}) for row in values])
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True, name="everyrank-horovod").start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def _in_environment(variables: Mapping[str, str]) -> Generator[None]:
    """Set environment variables while Horovod starts, and restore them: child processes must not read them."""
    old_values = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in old_values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
