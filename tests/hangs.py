"""Twelve ways to hang: what people write, each a function of the world.

A line that ends in "# cause" is where the rank stands whose fault it is, one that ends in "# waits" where others wait.
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
    """Rank 0 alone gathers its metrics; rank 1 goes on to its next batch."""
    if rank == 0:
        dist.all_reduce(torch.ones(3))  # waits
    while rank == 1:
        time.sleep(0.05)  # cause


def uneven_loop(rank: int) -> None:
    """Rank 1 has one batch less."""
    for _ in range(4 - rank):
        dist.all_reduce(torch.ones(3))  # waits


def different_order(rank: int) -> None:
    """Each has the two collectives in another order."""
    values = torch.ones(3)
    if rank == 0:
        dist.all_reduce(values)  # waits
        dist.broadcast(values, src=0)
    else:
        dist.broadcast(values, src=0)  # cause
        dist.all_reduce(values)


def another_shape(rank: int) -> None:
    """The last batch of rank 1 is smaller."""
    if rank == 0:
        dist.all_reduce(torch.ones(8))  # waits
    else:
        dist.all_reduce(torch.ones(6))  # cause


def another_dtype(rank: int) -> None:
    """Rank 1 has come out of autocast."""
    if rank == 0:
        dist.all_reduce(torch.ones(8))  # waits
    else:
        dist.all_reduce(torch.ones(8, dtype=torch.float64))  # cause


def exception_on_one_rank(rank: int) -> None:
    """Rank 1 catches an error of its batch, and hands it to a thread that has ended its work."""
    try:
        if rank == 1:
            raise ValueError("a broken image")
        dist.all_reduce(torch.ones(3))  # waits
    except ValueError:
        threading.Event().wait()  # cause


class Locked(Dataset[int]):
    """The lock was held when the worker was forked: nobody lets go of it there."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        with LOCK:  # worker
            return index


def deadlock_in_the_loader(rank: int) -> None:
    """Rank 1 has forked its loader worker while it held a lock."""
    if rank == 1:
        LOCK.acquire()
        for _ in DataLoader(Locked(), num_workers=1):  # cause
            pass
    dist.all_reduce(torch.ones(3))  # waits


def forgotten_join(rank: int) -> None:
    """DistributedDataParallel over uneven inputs, without its `join`."""
    model = DistributedDataParallel(nn.Linear(3, 2))
    for _ in range(3 - rank):
        model(torch.ones(1, 3)).sum().backward()  # waits


def wrong_group(rank: int) -> None:
    """Rank 1 averages over another group than rank 0."""
    group = dist.new_group([0, 1])
    if rank == 0:
        dist.all_reduce(torch.ones(3), group=group)  # waits
    else:
        dist.all_reduce(torch.ones(3))  # cause


def barrier_in_one_branch(rank: int) -> None:
    """Only rank 0, which saves, comes to the barrier; rank 1 computes."""
    if rank == 0:
        dist.barrier()  # waits
    else:
        _compute()


def _compute() -> None:
    while True:
        sum(range(1000))  # cause


def stopped(rank: int) -> None:
    """Somebody, or a scheduler, has stopped rank 1."""
    if rank == 1:
        time.sleep(2.0)  # it has been seen here
        os.kill(os.getpid(), signal.SIGSTOP)  # cause
    dist.all_reduce(torch.ones(3))  # waits


def save_on_rank_0_under_fsdp(rank: int) -> None:
    """Rank 0 alone asks for the whole model, which gathers its parts from all."""
    model = nn.Linear(3, 2)
    fully_shard(model)
    if rank == 0:
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # waits
    dist.barrier()  # cause


WAYS: dict[str, Callable[[int], None]] = {
    way.__name__: way
    for way in (
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


def hang(info: RankInfo, name: str, launch: Launch) -> None:
    """What each rank runs: it meets the others, goes one step together with them, and hangs."""
    with open_world(info, launch) as world:  # end
        one_step(world)
        WAYS[name](world.rank)


def one_step(world: World) -> None:
    """From here on no wait is longer than --timeout."""
    dist.all_reduce(torch.ones(2))
    end_of_start(world)


def line_of(function: Any, mark: str) -> int:
    """The line of this file, in this function, that ends in the mark."""
    first = function.__code__.co_firstlineno
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(n for n, line in enumerate(lines, 1) if n >= first and line.endswith(f"# {mark}"))
