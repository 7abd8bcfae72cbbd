"""One rank's place in the world, and what is chosen for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from everyrank.backends import OWN_BACKENDS
from everyrank.errors import CannotRunError, UsageError

__all__ = [
    "World",
    "cards_here",
    "choose_backend",
    "choose_device",
    "choose_threads",
    "describe_device",
    "device_name",
    "single_process_world",
    "use_threads",
]


@dataclass
class GroupCache:
    """Groups of some of the ranks. They end with the world: making one is a collective of all ranks, and layouts are
    prepared again and again.

    groups          process groups along axes of a layout
    device_meshes   torch's meshes
    alone           of this rank only; only ranks that have worked alone have made it
    saving          of all ranks on CPU: for what saves in the background (True), and for what saves at once
    at_end          by name, what ends communication that is not torch's (Horovod), called by every rank
    """

    groups: dict[Any, dist.ProcessGroup] = field(default_factory=dict[Any, Any])
    device_meshes: dict[Any, DeviceMesh] = field(default_factory=dict[Any, Any])
    alone: dist.ProcessGroup | None = None
    saving: dict[bool, dist.ProcessGroup] = field(default_factory=dict[bool, Any])
    at_end: dict[str, Callable[[], object]] = field(default_factory=dict[str, Callable[[], object]])

    def clear(self) -> None:
        """Forget all groups: their world has ended."""
        for end in self.at_end.values():
            end()
        self.at_end.clear()
        self.groups.clear()
        self.device_meshes.clear()
        self.saving.clear()
        self.alone = None


@dataclass(frozen=True)
class World:
    """One rank's place in the world.

    rank, size              over all hosts
    local_rank, local_size  on this host
    device                  where this rank computes
    backend                 what carries its collectives: shm, mpi, gloo or nccl
    threads                 CPU threads of this rank
    loader_workers          data loader processes of this rank
    timeout_seconds         longest wait for another rank; of collectives, until the first update is done
    step_timeout_seconds    the same of collectives from then on; None: as before
    start_flag              the word of the command line that says the first of the two
    store                   where ranks leave each other small notes
    group                   all ranks; None in the world of one that `single_process_world` makes inside a larger one
    hosts                   the name of each rank's host
    devices                 what each rank computes on: `cpu`, or `cuda` and which card of its host
    choices                 what was chosen automatically, and why: backend, interface, threads
    threads_alone           CPU threads of a rank that works alone on its host
    group_cache             groups of some of the ranks, made when first asked for
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


def choose_device(asked: str | None, num_cuda: int) -> str:
    """The type of device: cpu or cuda. Raises `CannotRunError` for cuda on a machine without it."""
    if asked == "cuda" and num_cuda == 0:
        raise CannotRunError("--device cuda: torch sees no CUDA device here; use --device cpu")
    return asked or ("cuda" if num_cuda else "cpu")


def cards_here(world: World) -> list[str]:
    """The cards that ranks of this rank's host compute on: `0:3b:00` (domain, bus, device) of each."""
    here = zip(world.hosts, world.devices, strict=True)
    found = {device.partition(" ")[2] for host, device in here if host == world.hosts[world.rank]}
    return sorted(found - {""})


def describe_device(asked: str | None, kind: str) -> str:
    """The type of device that was chosen, and why; for whoever expected another one."""
    if asked is not None:
        return f"{kind}: asked for"
    if kind == "cuda":
        return "cuda: torch sees one"
    has_mps = torch.backends.mps.is_available()
    return f"cpu: torch sees no CUDA device{'; that of Apple (mps) is not used' * has_mps}"


def device_name(device: torch.device) -> str:
    """What tells this device from the others of its machine, in every process alike: `cpu`, or `cuda` and its card.

    Numbers do not: with one visible device for each rank (srun --gpus-per-task) all of them compute on `cuda:0`. The
    card is its place on the PCI bus, by which NCCL refuses two ranks of one; else its UUID.
    """
    if device.type != "cuda":
        return device.type
    card: Any = torch.cuda.get_device_properties(device)
    places = [getattr(card, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in places:
        return "cuda {:x}:{:02x}:{:02x}".format(*places)
    return f"cuda {getattr(card, 'uuid', device.index)}"


def choose_backend(asked: str | None, device: str, local_size: int, num_cuda: int) -> tuple[str, str]:
    """The backend, and why: for `local_size` ranks of a machine that compute on `num_cuda` different CUDA devices.

    `open_world` changes shm to gloo where ranks turn out to share no memory. Raises `UsageError` for a backend that
    cannot move tensors of this device.
    """
    if device == "cpu":
        if asked == "nccl":
            raise UsageError("--backend nccl: it moves CUDA tensors only; use shm or gloo with --device cpu")
        return (asked, "asked for") if asked else ("shm", "the tensors are on CPU, the ranks on one host")
    if asked in OWN_BACKENDS:
        raise UsageError(f"--backend {asked}: it moves CPU tensors only; use nccl or gloo with --device {device}")
    if local_size > num_cuda:
        why = f"{local_size} ranks share {num_cuda} CUDA device{'s' * (num_cuda != 1)}, which nccl refuses"
        if asked == "nccl":
            raise UsageError(f"--backend nccl: {why}; use gloo, or --processes {num_cuda}")
        return "gloo", why
    return (asked, "asked for") if asked else ("nccl", "one CUDA device for each rank")


def choose_threads(asked: int | None, cores: int, local_size: int) -> tuple[int, int, str]:
    """CPU threads of a rank and of one that works alone on its host, and why."""
    if asked is not None:
        threads = min(asked, cores)
        return threads, threads, f"{threads} in each process: asked for in the environment"
    threads = max(1, cores // local_size)
    cores_text = f"{cores} core{'s' * (cores != 1)}"
    if local_size == 1:
        return threads, threads, f"{threads}: as many as cores"
    return (
        threads,
        cores,
        f"{threads} for each rank: {cores_text} // {local_size} ranks; {cores} for one that works alone",
    )


def single_process_world(world: World) -> World:
    """The world of one in which rank 0 runs alone, with all the devices of this host, and threads for all its cores."""
    # as many loader workers as all ranks of the host have together: no layout is fed faster than another
    workers = world.loader_workers * world.local_size if world.size > 1 else world.loader_workers
    return replace(world, rank=0, size=1, threads=world.threads_alone, loader_workers=workers, group=None)


def use_threads(threads: int) -> None:
    """Compute with this many CPU threads from now on."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
