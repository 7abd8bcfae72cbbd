"""World: one rank's view of the job. Chooses its device, backend and threads."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from everyrank.backends import OWN_BACKENDS
from everyrank.errors import CannotRunError, UsageError

__all__ = [
    "World",
    "choose_backend",
    "choose_device",
    "choose_threads",
    "describe_device",
    "device_name",
    "gpus_of_host",
    "let_nccl_share",
    "single_process_world",
    "use_threads",
]


@dataclass
class GroupCache:
    """Process groups of some of the ranks, which live as long as the world.

    Making a group is a collective of all ranks, and layouts are prepared many times in a world.

    groups          process groups along axes of a layout
    device_meshes   torch's meshes
    alone           of this rank only; made by `group_of_one`
    saving          of all ranks on CPU: for asynchronous saves (True) and for synchronous ones (False)
    at_end          by name, functions that end communication outside torch (Horovod), called by every rank
    """

    groups: dict[Any, dist.ProcessGroup] = field(default_factory=dict[Any, Any])
    device_meshes: dict[Any, DeviceMesh] = field(default_factory=dict[Any, Any])
    alone: dist.ProcessGroup | None = None
    saving: dict[bool, dist.ProcessGroup] = field(default_factory=dict[bool, Any])
    at_end: dict[str, Callable[[], object]] = field(default_factory=dict[str, Callable[[], object]])

    def clear(self) -> None:
        """Forget all groups, because their world has ended."""
        for end in self.at_end.values():
            end()
        self.at_end.clear()
        self.groups.clear()
        self.device_meshes.clear()
        self.saving.clear()
        self.alone = None


@dataclass(frozen=True)
class World:
    """One rank's view of the job: its numbers, device, process group and store.

    rank, size              over all hosts
    local_rank, local_size  on this host
    device                  torch device of this rank
    backend                 of its collectives: shm, mpi, gloo or nccl
    threads                 CPU threads of this rank
    loader_workers          data loader processes of this rank
    timeout_seconds         longest wait for another rank; for collectives, until the first update is done
    step_timeout_seconds    timeout of collectives after the first update; None: `timeout_seconds`
    start_flag              the command-line flag that sets `timeout_seconds`
    store                   torch's key-value store for small messages between ranks
    group                   process group of all ranks; None in a `single_process_world`
    hosts                   the name of each rank's host
    devices                 the device of each rank: `cpu`, or `cuda` and the card of its host
    choices                 the automatic choices with their reasons: backend, interface, threads
    threads_alone           CPU threads of rank 0 while the other ranks wait
    group_cache             process groups of some of the ranks, made at first use
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
    hosts: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    choices: Mapping[str, str] = field(default_factory=dict[str, str])
    threads_alone: int = 1
    step_timeout_seconds: float | None = None
    start_flag: str = "--timeout"
    group_cache: GroupCache = field(default_factory=lambda: GroupCache(), repr=False, compare=False)

    @staticmethod
    @contextlib.contextmanager
    def pretend(size: int, rank: int = 0, per_host: int = 8) -> Generator[World]:
        """Yield the world of one rank of `size`, in which collectives return at once and no other rank exists.

        Its tensors stay on CPU, and its process groups are torch's `fake` backend. `plan/pretend.py` uses it with fake
        tensors, to run a strategy's own `prepare` and `step`. Raises `UsageError` if a process group already exists.

        Example: `with World.pretend(64, rank=3) as world: mesh = open_mesh(layout, world)`.
        """
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if dist.is_initialized():
            raise UsageError("World.pretend: this process is already a rank; call it in a separate process")
        if not 0 <= rank < size:
            raise UsageError(f"World.pretend({size}, {rank}): give a rank from 0 to {size - 1}")
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        try:
            yield World(
                rank=rank,
                size=size,
                local_rank=rank % per_host,
                local_size=min(per_host, size),
                device=torch.device("cpu"),
                backend="fake",
                threads=torch.get_num_threads(),
                loader_workers=0,
                timeout_seconds=60.0,
                store=_SilentStore(),
                group=dist.group.WORLD,
                hosts=tuple(f"host{index // per_host}" for index in range(size)),
                devices=("cpu",) * size,
            )
        finally:
            dist.destroy_process_group()


class _SilentStore(dist.HashStore):
    """A store in which every key is set: no barrier waits."""

    def check(self, keys: list[str]) -> bool:
        """Return True."""
        del keys
        return True


def choose_device(requested: str | None, num_cuda: int) -> str:
    """Return the type of device: cpu or cuda. Raises `CannotRunError` for cuda on a machine without it."""
    if requested == "cuda" and num_cuda == 0:
        raise CannotRunError("--device cuda: torch sees no CUDA device; use --device cpu")
    return requested or ("cuda" if num_cuda else "cpu")


def gpus_of_host(world: World) -> list[str]:
    """Return the GPUs that the ranks of this host use, each as `0:3b:00` (PCI domain, bus, device)."""
    devices = zip(world.hosts, world.devices, strict=True)
    cards = {device.partition(" ")[2] for host, device in devices if host == world.hosts[world.rank]}
    return sorted(cards - {""})


def describe_device(requested: str | None, kind: str) -> str:
    """Return the type of device and why it was chosen."""
    if requested is not None:
        return f"{kind}: requested"
    if kind == "cuda":
        return "cuda: torch sees one"
    has_mps_device = torch.backends.mps.is_available()
    return f"cpu: torch sees no CUDA device{'; the Apple device (mps) is not supported' * has_mps_device}"


def device_name(device: torch.device) -> str:
    """Return a name of this device, unique on its machine and equal in all processes: `cpu`, or `cuda` and its card.

    Device numbers are not unique: with one visible device for each rank (srun --gpus-per-task) all use `cuda:0`. The
    card is its PCI bus id, by which NCCL detects two ranks on one GPU; else its UUID.
    """
    if device.type != "cuda":
        return device.type
    card: Any = torch.cuda.get_device_properties(device)
    bus_ids = [getattr(card, f"pci_{field_name}_id", None) for field_name in ("domain", "bus", "device")]
    if None not in bus_ids:
        return "cuda {:x}:{:02x}:{:02x}".format(*bus_ids)
    return f"cuda {getattr(card, 'uuid', device.index)}"


def choose_backend(requested: str | None, device: str, local_size: int, num_cuda: int) -> tuple[str, str]:
    """Return the backend and the reason, for `local_size` ranks on `num_cuda` CUDA devices of a machine.

    `open_world` changes shm to gloo if ranks turn out to share no memory. Raises `UsageError` for a backend that
    cannot move tensors of this device.
    """
    if device == "cpu":
        if requested == "nccl":
            raise UsageError("--backend nccl: it moves CUDA tensors only; use shm or gloo with --device cpu")
        return (requested, "requested") if requested else ("shm", "the tensors are on CPU, the ranks on one host")
    if requested in OWN_BACKENDS:
        raise UsageError(f"--backend {requested}: it moves CPU tensors only; use nccl or gloo with --device {device}")
    if local_size > num_cuda:
        sharing = f"{local_size} ranks share {num_cuda} CUDA device{'s' * (num_cuda != 1)}"
        return ("nccl", f"requested; {sharing}, which is slow") if requested == "nccl" else ("gloo", sharing)
    return (requested, "requested") if requested else ("nccl", "one CUDA device for each rank")


def let_nccl_share(rank: int) -> None:
    """Let several ranks of one card use nccl, which refuses two ranks with the same host and card.

    With a separate host id, each rank counts as a host, and nccl uses sockets between them.
    """
    os.environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()}-{rank}")


def choose_threads(requested: int | None, cores: int, local_size: int) -> tuple[int, int, str]:
    """Return the CPU threads of a rank, those of rank 0 while the others wait, and the reason."""
    if requested is not None:
        threads = min(requested, cores)
        return threads, threads, f"{threads} in each process: set in the environment"
    threads = max(1, cores // local_size)
    cores_text = f"{cores} core{'s' * (cores != 1)}"
    if local_size == 1:
        return threads, threads, f"{threads}: as many as cores"
    return (
        threads,
        cores,
        f"{threads} for each rank: {cores_text} // {local_size} ranks; {cores} for rank 0 while the others wait",
    )


def single_process_world(world: World) -> World:
    """Return a world of size 1, in which rank 0 runs `single` with threads for all cores of this host."""
    # as many loader workers as all ranks of the host together, so that `single` loads as fast as other layouts
    workers = world.loader_workers * world.local_size if world.size > 1 else world.loader_workers
    return replace(world, rank=0, size=1, threads=world.threads_alone, loader_workers=workers, group=None)


def use_threads(threads: int) -> None:
    """Set torch's number of CPU threads."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
