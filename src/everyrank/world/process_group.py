"""open_world: connects the ranks, makes torch's process group, and destroys it."""

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
from everyrank.launch.host_info import choose_interface, usable_interfaces
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
    let_nccl_share,
    use_threads,
)

__all__ = ["end_of_start", "open_world"]

_SHUTDOWN_SECONDS = 10.0  # how long the rank that hosts the store waits for the others at the end
_SHUTDOWN_AFTER_ERROR_SECONDS = 1.5
_WORLDS_OPENED = itertools.count()
# FileStores that must not be destroyed before the process ends. The destructor of torch's FileStore counts its users in
# the file: if rank 0 has removed that file already, the destructor creates a new one, which a later run would find.
_OPEN_STORES: list[dist.Store] = []


@contextlib.contextmanager
def open_world(info: RankInfo, launch: Launch) -> Generator[World]:
    """Connect to the other ranks and yield the `World`. A collective at the beginning and at the end of the block.

    After an exception no rank waits for the others, because the launcher ends them.
    Raises `RankFailedError` with the ranks that did not connect within `launch.timeout_seconds`.
    """
    world, rendezvous = _make_world(info, launch)
    use_threads(world.threads)
    gc.collect()
    gc.freeze()  # loaded modules stay, so the garbage collector need not scan them between runs
    with _shutdown_after_error(world, rendezvous):
        register_rank(world.store, world.rank, rendezvous.address, device_name(world.device))
        store_barrier(world, "start")
        peers = wait_for_peers(world.store, world.size)
        world = replace(world, hosts=tuple(peer.host for peer in peers), devices=tuple(peer.device for peer in peers))
        is_one_machine, address = route_to_peers(peers, world.rank, rendezvous.address)
        check_same_device(peers)
        world = _with_final_backend(world, launch.backend, peers, is_one_machine=is_one_machine)
        network = _on_interface(launch, is_one_machine, address)
        with network as interface, _watching_peers(world, info), _recorded_calls():
            _init_process_group(world)
            store_barrier(
                world, "process group"
            )  # a rank that fails before this barrier would break connections that others are making
            yield replace(world, group=dist.group.WORLD, choices={**world.choices, "interface": interface})
            # A DistributedDataParallel that outlives its process group aborts the process: collect it first.
            gc.unfreeze()
            gc.collect()
            store_barrier(world, "end")
            world.group_cache.clear()
    dist.destroy_process_group()
    _shutdown_barrier(world, rendezvous.is_host, _SHUTDOWN_SECONDS)
    _remove(rendezvous)


def end_of_start(world: World) -> None:
    """Set the timeout of all process groups to --timeout. Called after the first update.

    The first update has --start-timeout, because ranks compile, fill caches and connect at different speeds.
    """
    state = current_state()
    if state is not None:
        state.is_started = True
    if world.step_timeout_seconds is None or world.group is None:
        return
    timeout = datetime.timedelta(seconds=world.step_timeout_seconds)
    internals: Any = distributed_c10d
    # private before torch 2.14, where the private name is deprecated
    set_timeout: Any = getattr(dist, "set_timeout", None) or internals._set_pg_timeout
    for group in internals._world.pg_map:
        if isinstance(group, PythonGroup):
            group.set_timeout(timeout)
        else:
            set_timeout(timeout, group)


def _make_world(info: RankInfo, launch: Launch) -> tuple[World, Rendezvous]:
    """Choose the device, backend and threads of this rank, and open the store. Waits only for the store's host.

    Raises `CannotRunError` or `UsageError` for an unavailable device or backend, and the errors of `open_store`.
    """
    num_cuda = torch.cuda.device_count()
    kind = choose_device(launch.device, num_cuda)
    # assumes one device for each rank; `_with_final_backend` counts shared devices
    backend, reason = choose_backend(launch.backend, kind, info.local_size, info.local_size)
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
        # A store may outlive a world: a restart, or a second world of the same process, uses different keys.
        store=dist.PrefixStore(f"everyrank/{info.store_round}/{next(_WORLDS_OPENED)}", rendezvous.store),
        group=None,
        choices={
            "device": describe_device(launch.device, kind),
            "backend": f"{backend}: {reason}",
            "interface": "",
            "threads": why_threads,
        },
        threads_alone=threads_alone,
        step_timeout_seconds=launch.timeout_seconds if launch.start_timeout_seconds is not None else None,
        start_flag=launch.start_flag,
    )
    return world, rendezvous


def _with_final_backend(world: World, requested: str | None, peers: Sequence[Peer], is_one_machine: bool) -> World:
    """Choose the backend again, knowing whether ranks share memory or devices. A collective over the store.

    Raises `CannotRunError` on all ranks for `--backend shm` if they share no memory.
    """
    if world.device.type == "cuda":
        ranks, cards = count_devices(peers)
        backend, reason = choose_backend(requested, "cuda", ranks, cards)
        if backend == "nccl" and ranks > cards:
            let_nccl_share(world.rank)
        return replace(world, backend=backend, choices={**world.choices, "backend": f"{backend}: {reason}"})
    if world.backend != "shm":
        return world
    store, seconds = dist.PrefixStore("shm", world.store), world.timeout_seconds
    problem = (
        no_shared_memory(store, world.rank, world.size, seconds)
        if is_one_machine
        else "the ranks are on several machines"
    )
    if not problem:
        return world
    if requested == "shm":
        raise CannotRunError(f"--backend shm: {problem}; use --backend gloo")
    return replace(world, backend="gloo", choices={**world.choices, "backend": f"gloo: {problem}"})


def _init_process_group(world: World) -> None:
    backend = register_backend(world.backend)
    dist.init_process_group(
        # nccl sends CUDA tensors only; gathers of CPU tensors go over gloo
        "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
        store=dist.PrefixStore("group", world.store),
        rank=world.rank,
        world_size=world.size,
        timeout=datetime.timedelta(seconds=world.timeout_seconds),
        device_id=world.device if world.backend == "nccl" else None,
    )


@contextlib.contextmanager
def _recorded_calls() -> Generator[None]:
    """Record the collectives of this rank, for the report of a hang.

    The Flight Recorder reads its size from the environment when a group first needs it.
    """
    name, state = "TORCH_FR_BUFFER_SIZE", current_state()
    is_set = name in os.environ
    os.environ.setdefault(name, str(KEPT_CALLS))
    if state is not None:
        state.calls = recorded_calls
    try:
        yield
    finally:
        if not is_set:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _on_interface(launch: Launch, is_one_machine: bool, local_address: str | None) -> Generator[str]:
    """Set the network interface of gloo and NCCL: loopback on one machine, else the one on the route to the others.

    Both read it from the environment whenever a group is made. Yields the choice with its reason.
    """
    old_values = {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    variable, interfaces = old_values["GLOO_SOCKET_IFNAME"], usable_interfaces()
    name, reason = choose_interface(launch.interface, variable, is_one_machine, local_address, interfaces)
    for variable, value in old_values.items():
        if name is not None and (value is None or launch.interface is not None):
            # without `=`, NCCL takes the name as a prefix
            os.environ[variable] = f"={name}" if variable.startswith("NCCL") else name
    try:
        yield f"{name or 'by the backend'}: {reason}"
    finally:
        for variable, value in old_values.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value


@contextlib.contextmanager
def _watching_peers(world: World, info: RankInfo) -> Generator[None]:
    """Replace a secondary error by the failure of the rank that caused it. On one host the launcher does this."""
    if info.local_size == info.size:
        yield
        return
    monitor = PeerMonitor(world.store, world.rank, world.hosts, world.timeout_seconds, info.fail)
    try:
        yield
    except Exception as error:
        if not is_secondary_error(error):
            monitor.report(error)
            raise
        cause = monitor.find_first_failure()
        if cause is None:
            monitor.report(error)
            raise
        raise cause from error
    finally:
        monitor.end()


@contextlib.contextmanager
def _shutdown_after_error(world: World, rendezvous: Rendezvous) -> Generator[None]:
    """Keep the store open for a moment after an error, because the peers still read this rank's report."""
    try:
        yield
    except Exception:
        with contextlib.suppress(Exception):
            _shutdown_barrier(world, rendezvous.is_host, _SHUTDOWN_AFTER_ERROR_SECONDS)
        _remove(rendezvous)
        raise


def _remove(rendezvous: Rendezvous) -> None:
    """Remove the file of a file:// rendezvous, on the rank that leaves last."""
    if rendezvous.file is None:
        return
    if rendezvous.is_host:
        rendezvous.file.unlink(missing_ok=True)
    else:
        _OPEN_STORES.append(rendezvous.store)


def _shutdown_barrier(world: World, is_host: bool, seconds: float) -> None:
    """Wait on the rank that hosts the store until the others have left, because they still read it."""
    if not is_host:
        with contextlib.suppress(RuntimeError):  # rank 0 may have stopped waiting
            world.store.set(f"left/{world.rank}", "gone")
        return
    deadline = time.monotonic() + seconds
    waiting = [f"left/{rank}" for rank in range(world.size) if rank != world.rank]
    while time.monotonic() < deadline and waiting and not world.store.check(waiting):
        time.sleep(0.005)
