"""Calls a function of a test on one rank, with a process group."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Generator
from typing import Any, NamedTuple
from urllib.request import url2pathname

import cloudpickle
import torch
import torch.distributed as dist

from everyrank.backends import register_backend
from everyrank.errors import UsageError
from everyrank.launch import RankInfo, rank_info_from_environment
from everyrank.launch.autopsy import current_state
from everyrank.launch.host_info import LOOPBACK
from everyrank.launch.launcher import BatchLauncher, find_launcher
from everyrank.script.variables import rank_variables
from everyrank.world.calls import KEPT_CALLS, recorded_calls
from everyrank.world.world import let_nccl_share

__all__ = ["TEST_BACKENDS", "Skipped", "run_function_rank"]

TEST_BACKENDS = ("gloo", "shm", "nccl")


class Skipped(NamedTuple):
    """The result of a rank whose function called `pytest.skip`."""

    reason: str


def run_function_rank(info: RankInfo, backend: str | None, timeout_seconds: float, content: bytes) -> Any:
    """Call a function with its arguments (`content`, by cloudpickle). Returns its result, or `Skipped`.

    backend   the backend of torch.distributed during the call; None: it is not initialized

    Raises `UsageError` in a pytest that is itself a rank of a launcher: `run_ranks` starts no ranks there.
    """
    if rank_info_from_environment(os.environ) is not None:
        launcher = find_launcher(info.started_by)
        hint = launcher.shell_hint if isinstance(launcher, BatchLauncher) else ""
        raise UsageError(
            f"this pytest is rank {info.rank} of {info.size} according to its environment, but its tests start their "
            f"own ranks: start pytest without a launcher, and without RANK and WORLD_SIZE{hint}"
        )
    os.environ.update(rank_variables(info, timeout_seconds))
    torch.set_num_threads(info.threads or 1)
    function: Callable[..., Any]
    function, arguments, keywords = cloudpickle.loads(content)
    try:
        with _process_group(info, backend, timeout_seconds):
            return function(*arguments, **keywords)
    except BaseException as error:
        if type(error).__name__ == "Skipped" and not isinstance(error, Exception):  # pytest's
            return Skipped(str(error))
        raise


@contextlib.contextmanager
def _process_group(info: RankInfo, backend: str | None, timeout_seconds: float) -> Generator[None]:
    """Initialize torch.distributed with a file, without opening a port.

    `everyrank.world.open_world` takes longer: it also finds hosts, chooses devices, and collects garbage.
    """
    if backend is None:
        yield
        return
    if backend not in TEST_BACKENDS:
        raise UsageError(f"backend={backend!r}: give {', '.join(TEST_BACKENDS)}, or None for no process group")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(KEPT_CALLS))
    if (state := current_state()) is not None:
        state.calls = recorded_calls
    if backend == "nccl":
        torch.cuda.set_device(info.local_rank % max(1, torch.cuda.device_count()))
        if info.local_size > torch.cuda.device_count():
            let_nccl_share(info.rank)
    dist.init_process_group(
        register_backend(backend),
        store=dist.FileStore(url2pathname(info.rendezvous_url.removeprefix("file://")), info.size),
        rank=info.rank,
        world_size=info.size,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )
    yield
    dist.barrier()  # a rank that ends first would break the connections of the others
    dist.destroy_process_group()
