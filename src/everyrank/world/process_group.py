"""The one place where a process group is made, and ended."""

from __future__ import annotations

import contextlib
import datetime
import gc
import itertools
import os
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from everyrank.backends import PythonGroup, no_shared_memory, register_backend
from everyrank.errors import CannotRunError
from everyrank.launch import Launch, RankInfo, num_cores
from everyrank.launch.autopsy import current_state
from everyrank.launch.hosts import choose_interface, usable_interfaces
from everyrank.world.barrier import store_barrier
from everyrank.world.calls import KEPT_CALLS, recorded_calls
from everyrank.world.heartbeat import (
    Peer,
    PeerMonitor,
    check_same_device,
    count_devices,
    is_secondary_error,
    register_rank,
    route_to_peers,
    wait_for_peers,
)
from everyrank.world.rendezvous import Rendezvous, open_store
from everyrank.world.world import (
    World,
    choose_backend,
    choose_device,
    choose_threads,
    describe_device,
    device_name,
    use_threads,
)

__all__ = ["end_of_start", "open_world"]

_LONGEST_LEAVE_SECONDS = 10.0
_SHORT_LEAVE_SECONDS = 1.5  # after an error
_WORLDS_OPENED = itertools.count()
# Stores in a file, of ranks that leave before the one that removes it. torch's counts who has let go of it: where the
# file was removed a moment before, it makes one again, for the next run to find.
_KEPT: list[dist.Store] = []


@contextlib.contextmanager
def open_world(info: RankInfo, launch: Launch) -> Generator[World]:
    """Meet the other ranks, and part from them when the block ends well.

    After an exception nobody is waited for: the launcher ends the other ranks.
    Raises `RankFailedError` that names the ranks which did not come within `launch.timeout_seconds`.
    """
    world, rendezvous = _make_world(info, launch)
    use_threads(world.threads)
    gc.collect()
    gc.freeze()  # what is loaded by now stays; collecting garbage between two runs need not look at it again
    with _leaving_together(world, rendezvous):
        register_rank(world.store, world.rank, rendezvous.address, device_name(world.device))
        store_barrier(world, "start")
        peers = wait_for_peers(world.store, world.size)
        world = replace(
            world, hosts=tuple(other.host for other in peers), devices=tuple(other.device for other in peers)
        )
        way = route_to_peers(peers, world.rank, rendezvous.address)
        check_same_device(peers)
        world = _with_settled_backend(world, launch.backend, peers, is_one_machine=way[0])
        with _on_interface(launch, *way) as interface, _watching_peers(world, info), _recorded():
            _init_process_group(world)
            store_barrier(world, "process group")  # who fails before peers have connected breaks their connections
            yield replace(world, group=dist.group.WORLD, choices={**world.choices, "interface": interface})
            # A DistributedDataParallel that outlives its process group aborts the process: collect it first.
            gc.unfreeze()
            gc.collect()
            store_barrier(world, "end")
            world.group_cache.clear()
    dist.destroy_process_group()
    _leave(world, rendezvous.is_host, _LONGEST_LEAVE_SECONDS)
    _remove(rendezvous)


def end_of_start(world: World) -> None:
    """The first update is done: from now on no collective waits longer than --timeout.

    Until then ranks compile, fill caches and make connections, each at its own pace (--start-timeout).
    """
    state = current_state()
    if state is not None:
        state.is_started = True
    if world.step_timeout_seconds is None or world.group is None:
        return
    timeout = datetime.timedelta(seconds=world.step_timeout_seconds)
    internals: Any = distributed_c10d
    # private before torch 2.14, which warns of the old name
    set_timeout: Any = getattr(dist, "set_timeout", None) or internals._set_pg_timeout
    for group in internals._world.pg_map:
        if isinstance(group, PythonGroup):
            group.set_timeout(timeout)
        else:
            set_timeout(timeout, group)


def _make_world(info: RankInfo, launch: Launch) -> tuple[World, Rendezvous]:
    """The device, backend and threads of this rank, and the store that it shares with the others; nobody has met yet.

    Raises `CannotRunError` or `UsageError` for a device or backend that cannot be had, and what `open_store` raises.
    """
    num_cuda = torch.cuda.device_count()
    kind = choose_device(launch.device, num_cuda)
    backend, why = choose_backend(launch.backend, kind, info.local_size, info.local_size)  # shared devices: see below
    device = torch.device("cuda", info.local_rank % num_cuda) if kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    threads, threads_alone, why_threads = choose_threads(info.threads, num_cores(), info.local_size)
    rendezvous = open_store(info, launch)
    world = World(
        rank=info.rank,
        size=info.size,
        local_rank=info.local_rank,
        local_size=info.local_size,
        device=device,
        backend=backend,
        threads=threads,
        loader_workers=launch.loader_workers,
        timeout_seconds=launch.start_seconds,
        # A store may outlive a world: a restart, or another world of the same process, has other names in it.
        store=dist.PrefixStore(f"everyrank/{info.store_round}/{next(_WORLDS_OPENED)}", rendezvous.store),
        group=None,
        choices={
            "device": describe_device(launch.device, kind),
            "backend": f"{backend}: {why}",
            "interface": "",
            "threads": why_threads,
        },
        threads_alone=threads_alone,
        step_timeout_seconds=launch.timeout_seconds if launch.start_timeout_seconds is not None else None,
        start_flag=launch.start_flag,
    )
    return world, rendezvous


def _with_settled_backend(world: World, asked: str | None, peers: Sequence[Peer], is_one_machine: bool) -> World:
    """What only all ranks together can tell: whether they share memory, or devices. A collective over the store.

    Raises `CannotRunError` on all ranks where they share no memory, and shm was asked for by name, and `UsageError`
    where nccl was and they share devices.
    """
    if world.device.type == "cuda":
        backend, why = choose_backend(asked, "cuda", *count_devices(peers))
        return replace(world, backend=backend, choices={**world.choices, "backend": f"{backend}: {why}"})
    if world.backend != "shm":
        return world
    store, seconds = dist.PrefixStore("shm", world.store), world.timeout_seconds
    why_not = (
        no_shared_memory(store, world.rank, world.size, seconds)
        if is_one_machine
        else "the ranks are on several machines"
    )
    if not why_not:
        return world
    if asked == "shm":
        raise CannotRunError(f"--backend shm: {why_not}; use --backend gloo")
    return replace(world, backend="gloo", choices={**world.choices, "backend": f"gloo: {why_not}"})


def _init_process_group(world: World) -> None:
    backend = register_backend(world.backend)
    dist.init_process_group(
        # nccl carries CUDA tensors only; what rank 0 collects on CPU travels over gloo
        "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
        store=dist.PrefixStore("group", world.store),
        rank=world.rank,
        world_size=world.size,
        timeout=datetime.timedelta(seconds=world.timeout_seconds),
        device_id=world.device if world.backend == "nccl" else None,
    )


@contextlib.contextmanager
def _recorded() -> Generator[None]:
    """Whoever asks why this rank hangs is told what it has called.

    The Flight Recorder reads its size from the environment when a group first needs it.
    """
    name, state = "TORCH_FR_BUFFER_SIZE", current_state()
    is_asked = name in os.environ
    os.environ.setdefault(name, str(KEPT_CALLS))
    if state is not None:
        state.calls = recorded_calls
    try:
        yield
    finally:
        if not is_asked:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _on_interface(launch: Launch, is_one_machine: bool, own_address: str | None) -> Generator[str]:
    """Ranks of one machine stay on loopback; those of several take the interface that leads to the others.

    gloo and NCCL read it from the environment whenever a group is made. Gives what was chosen, and why.
    """
    before = {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    variable, interfaces = before["GLOO_SOCKET_IFNAME"], usable_interfaces()
    name, why = choose_interface(launch.interface, variable, is_one_machine, own_address, interfaces)
    for variable, value in before.items():
        if name is not None and (value is None or launch.interface is not None):
            # NCCL takes a name for the beginning of names, unless it is told otherwise
            os.environ[variable] = f"={name}" if variable.startswith("NCCL") else name
    try:
        yield f"{name or 'by the backend'}: {why}"
    finally:
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value


@contextlib.contextmanager
def _watching_peers(world: World, info: RankInfo) -> Generator[None]:
    """Between hosts, an error that another rank caused becomes that rank's. On one host the launcher sees to it."""
    if info.local_size == info.size:
        yield
        return
    lookout = PeerMonitor(world.store, world.rank, world.hosts, world.timeout_seconds, info.fail)
    try:
        yield
    except Exception as error:
        if not is_secondary_error(error):
            lookout.report(error)
            raise
        cause = lookout.find_first_failure()
        if cause is None:
            lookout.report(error)
            raise
        raise cause from error
    finally:
        lookout.end()


@contextlib.contextmanager
def _leaving_together(world: World, rendezvous: Rendezvous) -> Generator[None]:
    """After an error, too, the store stays for a moment: peers still read there what this rank has told them."""
    try:
        yield
    except Exception:
        with contextlib.suppress(Exception):
            _leave(world, rendezvous.is_host, _SHORT_LEAVE_SECONDS)
        _remove(rendezvous)
        raise


def _remove(rendezvous: Rendezvous) -> None:
    """The file in which ranks met, by the one that leaves last."""
    if rendezvous.file is None:
        return
    if rendezvous.is_host:
        rendezvous.file.unlink(missing_ok=True)
    else:
        _KEPT.append(rendezvous.store)


def _leave(world: World, is_host: bool, seconds: float) -> None:
    """Go, the rank that hosts the store last: the peers still ask it who has come to the end."""
    if not is_host:
        with contextlib.suppress(RuntimeError):  # rank 0 has not waited any longer
            world.store.set(f"left/{world.rank}", "gone")
        return
    deadline = time.monotonic() + seconds
    waiting = [f"left/{rank}" for rank in range(world.size) if rank != world.rank]
    while time.monotonic() < deadline and waiting and not world.store.check(waiting):
        time.sleep(0.005)
