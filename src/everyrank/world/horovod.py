"""Horovod beside torch.distributed: started once in a world, with the same ranks, and ended with it.

Horovod brings its own processes together: each rank finds its place in variables, and the addresses of the others at a
server over HTTP. Under horovodrun both are there, and are used. Under any other launcher the variables follow from the
world, and rank 0 opens that server for as long as the ranks take to connect: on loopback, or, where ranks are on
several hosts, at the address over which they talk already.
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
from everyrank.launch.hosts import LOOPBACK, usable_interfaces
from everyrank.world.barrier import broadcast_text, store_barrier
from everyrank.world.world import World

__all__ = ["horovod_places", "import_horovod", "start_horovod", "wait_for_horovod"]

_PAUSE_SECONDS = 1e-4  # between two looks: Horovod's own thread looks every millisecond
_STARTS = itertools.count()  # every rank starts it as often
_PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")


def import_horovod() -> Any:
    """The module `horovod.torch`. Raises `CannotRunError` where it is not, or does not load."""
    try:
        return importlib.import_module("horovod.torch")
    except ImportError as error:
        if error.name in ("horovod", "horovod.torch"):
            why = "Horovod is not installed here"
        else:  # built for another torch, or without this one
            why = f"Horovod does not load ({describe(error).splitlines()[0]})"
        raise CannotRunError(
            f"{why}; build 0.28.1 for this torch (docs/horovod.md), or use layout ddp, or another --backend"
        ) from error


def start_horovod(world: World) -> Any:
    """The module `horovod.torch`, initialised with the ranks of the world. A collective of all ranks.

    Raises `CannotRunError` without Horovod, `UsageError` where its ranks are not those of the world, and
    `RankFailedError` where they do not connect within the timeout.
    """
    hvd = import_horovod()
    if "horovod" in world.group_cache.at_end:
        return hvd
    given = os.environ.get("HOROVOD_RANK") is not None
    if given:
        _check_given(os.environ, world)
    variables = {} if given else _own_variables(world)
    key = f"horovod/{next(_STARTS)}"
    with _rendezvous(world, key, given) as meeting, _in_environment({**variables, **meeting}):
        try:
            hvd.init()
        except ValueError as error:
            raise RankFailedError(
                f"Horovod: its ranks did not connect within {world.timeout_seconds:g} s (--timeout)"
            ) from error
        store_barrier(world, key)  # who closes the server before others have connected strands them
    _check_same_ranks(world, hvd.rank(), hvd.size())
    world.group_cache.at_end["horovod"] = hvd.shutdown
    return hvd


def horovod_places(hosts: Sequence[str]) -> list[dict[str, str]]:
    """What each rank's place is to Horovod, by rank, as variables without their prefix.

    hosts   the name of each rank's host

    LOCAL_RANK counts the ranks of a host. CROSS_RANK counts, among the hosts that have such a local rank, this one.
    """
    local: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        local.setdefault(host, []).append(rank)
    places: dict[int, dict[str, str]] = {}
    for host, ranks in local.items():
        for local_rank, rank in enumerate(ranks):
            peers = [name for name, others in local.items() if len(others) > local_rank]
            values = (rank, len(hosts), local_rank, len(ranks), peers.index(host), len(peers), host)
            places[rank] = dict(zip(_PLACE, map(str, values), strict=True))
    return [places[rank] for rank in range(len(hosts))]


def wait_for_horovod(hvd: Any, handles: Iterable[int], world: World) -> None:
    """Until these operations of Horovod are done. Raises `RankFailedError` where that takes longer than the timeout.

    Horovod itself would wait for ever: its stall check never fires under the gloo controller, which holds an empty list
    of ranks (of 0.28.1, gloo_controller.cc: reserved, not resized).
    """
    deadline = time.monotonic() + world.timeout_seconds
    for handle in handles:
        while not hvd.poll(handle):
            if time.monotonic() > deadline:
                raise RankFailedError(f"Horovod: not all ranks came within {world.timeout_seconds:g} s (--timeout)")
            time.sleep(_PAUSE_SECONDS)


def _own_variables(world: World) -> dict[str, str]:
    place = horovod_places(world.hosts or ["localhost"] * world.size)[world.rank]
    own = {f"HOROVOD_{name}": value for name, value in place.items()}
    asked = {  # a person's own settings count
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(math.ceil(world.timeout_seconds)),
        "HOROVOD_LOG_LEVEL": "fatal",  # what its C++ says is also raised
    }
    return own | {name: value for name, value in asked.items() if name not in os.environ}


def _check_given(environment: Mapping[str, str], world: World) -> None:
    """The place that horovodrun has given is that of the world. Raises `UsageError`."""
    try:
        rank, size = (int(environment[name]) for name in ("HOROVOD_RANK", "HOROVOD_SIZE"))
    except (KeyError, ValueError) as error:
        raise UsageError("HOROVOD_RANK is in the environment, but no HOROVOD_SIZE to go with it: unset it") from error
    _check_same_ranks(world, rank, size)


def _check_same_ranks(world: World, rank: int, size: int) -> None:
    """Gradients would be added up over other ranks than those that the loop counts."""
    if (rank, size) != (world.rank, world.size):
        raise UsageError(
            f"Horovod's rank is {rank} of {size}, and this is rank {world.rank} of {world.size}: "
            "start all ranks with horovodrun alone, or unset HOROVOD_RANK"
        )


@contextlib.contextmanager
def _rendezvous(world: World, key: str, given: bool) -> Generator[dict[str, str]]:
    """While the ranks connect: where they find each other's addresses, as variables. Nothing under horovodrun."""
    if given or world.size == 1:
        yield {}
        return
    is_one_host = len(set(world.hosts)) <= 1
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    interface = interface or (LOOPBACK if is_one_host else "")
    found = {"HOROVOD_GLOO_IFACE": interface} if interface else {}
    with contextlib.ExitStack() as closing:
        text = None
        if world.rank == 0:
            address = "127.0.0.1" if is_one_host else usable_interfaces().get(interface, "")
            if not address:
                raise UsageError("Horovod: which interface leads to the other hosts? give --interface NAME")
            text = json.dumps([address, closing.enter_context(_server(address, horovod_places(world.hosts)))])
        address, port = json.loads(broadcast_text(world, key, text))
        yield {**found, "HOROVOD_GLOO_RENDEZVOUS_ADDR": address, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}


@contextlib.contextmanager
def _server(address: str, places: Sequence[Mapping[str, str]]) -> Generator[int]:
    """Horovod's own rendezvous server on a port that the system chooses; that of horovodrun listens everywhere."""
    http: Any = importlib.import_module("horovod.runner.http.http_server")
    server = http.RendezvousHTTPServer((address, 0), http.RendezvousHandler, 0)
    slot: Any = importlib.import_module("horovod.runner.common.util.hosts").SlotInfo
    values = [{name: place[name] if name == "HOSTNAME" else int(place[name]) for name in _PLACE} for place in places]
    server.init([slot(**{name.lower(): value for name, value in row.items()}) for row in values])
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True, name="everyrank-horovod").start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def _in_environment(variables: Mapping[str, str]) -> Generator[None]:
    """While Horovod starts, which reads them then; later they would mislead what this process starts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
