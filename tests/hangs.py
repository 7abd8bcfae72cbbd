"""Twelve hangs that occur in user code. Each function takes the rank and is called on two ranks.

Comments mark the lines that a diagnosis must name. The rank that causes the hang is at the line with "# cause". The
other rank is at the line with "# waits".
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from everyrank.launch import Launch, RankInfo
from everyrank.world import World, end_of_start, open_world

LOCK = threading.Lock()


def rank_0_only_collective(rank: int) -> None:
    """Only rank 0 reduces its metrics. Rank 1 continues with its next batch."""
    if rank == 0:
        dist.all_reduce(torch.ones(3))  # waits
    while rank == 1:
        time.sleep(0.05)  # cause


def uneven_loop(rank: int) -> None:
    """Rank 1 has one batch fewer than rank 0."""
    for _ in range(4 - rank):
        dist.all_reduce(torch.ones(3))  # waits


def different_order(rank: int) -> None:
    """The ranks call two collectives in different orders."""
    values = torch.ones(3)
    if rank == 0:
        dist.all_reduce(values)  # waits
        dist.broadcast(values, src=0)
    else:
        dist.broadcast(values, src=0)  # cause
        dist.all_reduce(values)


def another_shape(rank: int) -> None:
    """Rank 1 has a smaller last batch, so its tensor has a different shape."""
    if rank == 0:
        dist.all_reduce(torch.ones(8))  # waits
    else:
        dist.all_reduce(torch.ones(6))  # cause


def another_dtype(rank: int) -> None:
    """Rank 1 passes a tensor of a different dtype."""
    if rank == 0:
        dist.all_reduce(torch.ones(8))  # waits
    else:
        dist.all_reduce(torch.ones(8, dtype=torch.float64))  # cause


def exception_on_one_rank(rank: int) -> None:
    """Rank 1 catches an error in its batch, then waits for an event that no thread sets."""
    try:
        if rank == 1:
            raise ValueError("a broken image")
        dist.all_reduce(torch.ones(3))  # waits
    except ValueError:
        threading.Event().wait()  # cause


class LockingDataset(Dataset[int]):
    """A dataset whose samples need the lock. A worker that is forked while the lock is held waits forever."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        with LOCK:  # worker
            return index


def deadlock_in_the_loader(rank: int) -> None:
    """Rank 1 forks a DataLoader worker while it holds a lock."""
    if rank == 1:
        LOCK.acquire()
        for _ in DataLoader(LockingDataset(), num_workers=1):  # cause
            pass
    dist.all_reduce(torch.ones(3))  # waits


def forgotten_join(rank: int) -> None:
    """Train with DistributedDataParallel on uneven inputs, without its `join` context manager."""
    model = DistributedDataParallel(nn.Linear(3, 2))
    for _ in range(3 - rank):
        model(torch.ones(1, 3)).sum().backward()  # waits


def wrong_group(rank: int) -> None:
    """Rank 1 reduces over a different process group than rank 0."""
    group = dist.new_group([0, 1])
    if rank == 0:
        dist.all_reduce(torch.ones(3), group=group)  # waits
    else:
        dist.all_reduce(torch.ones(3))  # cause


def barrier_in_one_branch(rank: int) -> None:
    """Only rank 0 calls the barrier, in the branch that saves. Rank 1 computes."""
    if rank == 0:
        dist.barrier()  # waits
    else:
        _compute()


def _compute() -> None:
    """Compute forever."""
    while True:
        sum(range(1000))  # cause


def stopped(rank: int) -> None:
    """SIGSTOP stops rank 1, as a user or a scheduler may do."""
    if rank == 1:
        time.sleep(2.0)  # the diagnosis names this line, where rank 1 was last seen before the stop
        os.kill(os.getpid(), signal.SIGSTOP)  # cause
    dist.all_reduce(torch.ones(3))  # waits


def save_on_rank_0_under_fsdp(rank: int) -> None:
    """Only rank 0 requests the full state dict, which gathers the shards of all ranks."""
    model = nn.Linear(3, 2)
    fully_shard(model)
    if rank == 0:
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # waits
    dist.barrier()  # cause


HANGS: dict[str, Callable[[int], None]] = {
    function.__name__: function
    for function in (
        rank_0_only_collective,
        uneven_loop,
        different_order,
        another_shape,
        another_dtype,
        exception_on_one_rank,
        deadlock_in_the_loader,
        forgotten_join,
        wrong_group,
        barrier_in_one_branch,
        stopped,
        save_on_rank_0_under_fsdp,
    )
}


def run_hang(info: RankInfo, name: str, launch: Launch) -> None:
    """Join the world, run one collective on all ranks, then hang. Each rank calls this function."""
    with open_world(info, launch) as world:  # end
        run_first_collective(world)
        HANGS[name](world.rank)


def run_first_collective(world: World) -> None:
    """Run an all-reduce and end the start phase. Later collectives time out after `--timeout`."""
    dist.all_reduce(torch.ones(2))
    end_of_start(world)


def line_of(function: Any, mark: str) -> int:
    """Return the number of the first line in a function that ends with `# mark`."""
    first_line = function.__code__.co_firstlineno
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if number >= first_line and line.endswith(f"# {mark}"))
