"""Inside one process: rank, device, process group, threads. Opened once, closed cleanly.

    with open_world(facts, launch) as world:
        ...

A world of one has the same interface. Every wait here has a timeout that names who was missing.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import itertools
import json
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlparse
from urllib.request import url2pathname

import torch
import torch.distributed as dist

from everyrank.errors import CannotRunError, EveryrankError, RankFailedError, UsageError, kind_named
from everyrank.launch import Launch, RankFacts, num_cores

__all__ = [
    "World",
    "alone",
    "choose_backend",
    "choose_device",
    "from_rank_0",
    "meet",
    "on_rank_0",
    "open_world",
    "tell",
    "use_threads",
]

T = TypeVar("T")
_LONGEST_GOODBYE_SECONDS = 10.0
_WORLDS_OPENED = itertools.count()


@dataclass(frozen=True)
class World:
    """One rank's place in the world.

    rank, size              over all hosts
    local_rank, local_size  on this host
    device                  where this rank computes
    backend                 what carries its collectives: gloo or nccl
    threads                 CPU threads of this rank: cores of the host // ranks on it
    loader_workers          data loader processes of this rank
    timeout_seconds         longest wait for another rank
    store                   where ranks leave each other small notes
    group                   all ranks; None in the world of one that `alone` makes inside a larger one
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str
    threads: int
    loader_workers: int
    timeout_seconds: float
    store: dist.Store
    group: dist.ProcessGroup | None


def choose_device(asked: str | None, num_cuda: int) -> str:
    """The type of device: cpu or cuda. Raises `CannotRunError` for cuda on a machine without it."""
    if asked == "cuda" and num_cuda == 0:
        raise CannotRunError("--device cuda: torch sees no CUDA device here; use --device cpu")
    return asked or ("cuda" if num_cuda else "cpu")


def choose_backend(asked: str | None, device: str, local_size: int, num_cuda: int) -> tuple[str, str]:
    """The backend, and why. Raises `UsageError` for nccl where it cannot work."""
    if device == "cpu":
        if asked == "nccl":
            raise UsageError("--backend nccl: it moves CUDA tensors only; use gloo with --device cpu")
        return "gloo", "the tensors are on CPU"
    if local_size > num_cuda:
        why = f"{local_size} ranks share {num_cuda} CUDA device{'s' * (num_cuda != 1)}, which nccl refuses"
        if asked == "nccl":
            raise UsageError(f"--backend nccl: {why}; use gloo, or --processes {num_cuda}")
        return "gloo", why
    return (asked, "asked for") if asked else ("nccl", "one CUDA device for each rank")


@contextlib.contextmanager
def open_world(facts: RankFacts, launch: Launch) -> Generator[World]:
    """Meet the other ranks, and part from them when the block ends well.

    After an exception nobody is waited for: the launcher ends the other ranks.
    Raises `RankFailedError` that names the ranks which did not come within `launch.timeout_seconds`.
    """
    num_cuda = torch.cuda.device_count()
    kind = choose_device(launch.device, num_cuda)
    backend, _ = choose_backend(launch.backend, kind, facts.local_size, num_cuda)
    device = torch.device("cuda", facts.local_rank % num_cuda) if kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=launch.timeout_seconds)
    store = _open_store(facts, timeout)
    world = World(
        rank=facts.rank,
        size=facts.size,
        local_rank=facts.local_rank,
        local_size=facts.local_size,
        device=device,
        backend=backend,
        threads=max(1, num_cores() // facts.local_size),
        loader_workers=launch.loader_workers,
        timeout_seconds=launch.timeout_seconds,
        store=store,
        group=None,
    )
    use_threads(world.threads)
    gc.collect()
    gc.freeze()  # what is loaded by now stays; collecting garbage between two runs need not look at it again
    meet(world, "start")
    dist.init_process_group(
        # nccl carries CUDA tensors only; what rank 0 collects on CPU travels over gloo
        "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
        store=dist.PrefixStore("group", store),
        rank=facts.rank,
        world_size=facts.size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    yield replace(world, group=dist.group.WORLD)
    # A DistributedDataParallel that outlives its process group aborts the process: collect it first.
    gc.unfreeze()
    gc.collect()
    meet(world, "end")
    dist.destroy_process_group()
    _leave(world, facts.hosts_store)


def _leave(world: World, hosts_store: bool) -> None:
    """Go, the rank that hosts the store last: the others still ask it who has come to the end."""
    if not hosts_store:
        world.store.set(f"left/{world.rank}", "gone")
        return
    deadline = time.monotonic() + _LONGEST_GOODBYE_SECONDS
    waiting = [f"left/{rank}" for rank in range(world.size) if rank != world.rank]
    while time.monotonic() < deadline and waiting and not world.store.check(waiting):
        time.sleep(0.005)


def alone(world: World) -> World:
    """The world of one in which rank 0 runs alone, with all the threads and devices of this host."""
    # as many loader workers as all ranks of the host have together: no layout is fed faster than another
    workers = world.loader_workers * world.local_size if world.size > 1 else world.loader_workers
    return replace(world, rank=0, size=1, threads=num_cores(), loader_workers=workers, group=None)


def use_threads(threads: int) -> None:
    """Compute with this many CPU threads from now on."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def meet(world: World, where: str) -> None:
    """Wait until every rank has come to `where` (a name used once). Raises `RankFailedError` naming the missing."""
    world.store.set(f"{where}/{world.rank}", "here")
    deadline = time.monotonic() + world.timeout_seconds
    missing = list(range(world.size))
    pause = 0.001
    while missing := [rank for rank in missing if not world.store.check([f"{where}/{rank}"])]:
        if time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise RankFailedError(
                f"rank{'s' * (len(missing) > 1)} {names} did not come to the {where} "
                f"within {world.timeout_seconds:g} s (--timeout)"
            )
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)


def _open_store(facts: RankFacts, timeout: datetime.timedelta) -> dist.Store:
    """The store that all ranks share, under a name of this attempt."""
    where = urlparse(facts.rendezvous)
    if where.scheme == "file":
        store: dist.Store = dist.FileStore(str(Path(url2pathname(where.path))), facts.size)
    else:
        assert where.hostname is not None
        assert where.port is not None
        try:
            store = dist.TCPStore(
                where.hostname,
                where.port,
                is_master=facts.hosts_store,
                timeout=timeout,
                wait_for_workers=False,
            )
        except RuntimeError as error:
            what = "open" if facts.hosts_store else "reach"
            reason = str(error).splitlines()[0]
            raise RankFailedError(
                f"cannot {what} the store of rank 0 at {where.hostname}:{where.port}: {reason}"
            ) from error
    # A store may outlive a world: another attempt, or another world of the same process, has other names in it.
    return dist.PrefixStore(f"everyrank/{facts.attempt}/{next(_WORLDS_OPENED)}", store)


def tell(world: World, key: str, text: str | None) -> str:
    """Rank 0's `text` under `key` (a name used once) on every rank; the others pass None and wait as long as it takes.

    There is no time limit, because rank 0 may be training alone; the launcher ends this rank when rank 0 dies.
    """
    if world.rank == 0:
        assert text is not None
        world.store.set(f"tell/{key}", text)
        return text
    pause = 0.001
    while not world.store.check([f"tell/{key}"]):
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
    return world.store.get(f"tell/{key}").decode()


def on_rank_0(world: World, key: str, function: Callable[[], T]) -> T | None:
    """Call `function` on rank 0, with all the threads of the host, while the others wait; None on those.

    What it raises is raised on every rank: a workload that is wrong is wrong everywhere.
    """
    return _on_rank_0(world, key, function, lambda _: "")[0]


def from_rank_0(world: World, key: str, function: Callable[[], Any]) -> Any:
    """`on_rank_0`, and what the function returns (of what JSON can carry) on every rank."""
    return json.loads(_on_rank_0(world, key, function, json.dumps)[1])


def _on_rank_0(world: World, key: str, function: Callable[[], T], encode: Callable[[T], str]) -> tuple[T | None, str]:
    if world.rank != 0:
        error, _, text = tell(world, key, None).partition("\n")
        if error:
            raise kind_named(error)(text)
        return None, text
    use_threads(alone(world).threads)
    try:
        result = function()
    except EveryrankError as error:
        tell(world, key, f"{type(error).__name__}\n{error}")
        raise
    finally:
        use_threads(world.threads)
    return result, tell(world, key, "\n" + encode(result)).partition("\n")[2]
