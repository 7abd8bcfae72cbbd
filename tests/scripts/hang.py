"""A training script that hangs in the way that its first argument names; two ranks on gloo.

A line that ends in "# cause" is where the rank stands whose fault it is, one that ends in "# waits" where others wait.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

LOCK = threading.Lock()


def skipped_collective(rank):
    """A metric is reduced only where the loss is printed."""
    if rank == 0:
        dist.all_reduce(torch.ones(3))  # waits
    while rank == 1:
        time.sleep(0.05)  # cause


def barrier_while_saving(rank):
    """Rank 0 writes to a file system that does not answer."""
    if rank == 0:
        subprocess.run(["sleep", "600"])  # cause
    dist.barrier()  # waits


def unequal_batches(rank):
    """Rank 0 has one batch more; rank 1 is already in the evaluation."""
    model = DistributedDataParallel(nn.Linear(3, 2))
    for _ in range(3 - rank):
        model(torch.ones(1, 3)).sum().backward()  # waits
    dist.all_reduce(torch.zeros(1))  # cause


def sleeping(rank):
    if rank == 1:
        time.sleep(600)  # cause
    dist.all_reduce(torch.ones(3))  # waits


def locked(rank):
    """A logger's lock is taken twice."""
    with LOCK:
        if rank == 1:
            LOCK.acquire()  # cause
    dist.all_reduce(torch.ones(3))  # waits


class Slow(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(600)  # worker
        return index


def loader_worker(rank):
    if rank == 1:
        for _ in DataLoader(Slow(), num_workers=1):  # cause
            pass
    dist.all_reduce(torch.ones(3))  # waits


def order_of_groups(rank):
    """Each waits in another group for the other."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    for group in (first, second) if rank == 0 else (second, first):
        dist.all_reduce(torch.ones(3), group=group)  # cause


def left_early(rank):
    """Rank 1 has no batch, and returns."""
    if rank == 1:
        return  # cause
    dist.all_reduce(torch.ones(3))  # waits


def state_dict_on_rank_0(rank):
    """FSDP gathers the whole model from all ranks."""
    model = nn.Sequential(nn.Linear(3, 2))
    fully_shard(model)
    if rank == 0:
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # waits
    dist.barrier()  # cause


def fsdp_forward_on_rank_0(rank):
    """Only rank 0 evaluates."""
    model = nn.Sequential(nn.Linear(3, 2))
    fully_shard(model)
    if rank == 0:
        model(torch.ones(1, 3))  # waits
    time.sleep(600)  # cause


def object_collective(rank):
    if rank == 0:
        dist.all_gather_object([None, None], {"loss": 1.0})  # waits
    else:
        dist.broadcast_object_list([None], src=0)  # cause


def receive_without_send(rank):
    """A pipeline stage that sends one micro-batch less."""
    if rank == 0:
        dist.recv(torch.zeros(3), src=1)  # waits
    while rank == 1:
        time.sleep(0.05)  # cause


def receive_from_each_other(rank):
    dist.recv(torch.zeros(3), src=1 - rank)  # cause


def stopped(rank):
    if rank == 1:
        time.sleep(1.5)  # cause
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(3))  # waits


def group_on_one_rank(rank):
    """All ranks must call new_group."""
    if rank == 0:
        dist.new_group([0, 1])  # waits
    else:
        time.sleep(600)  # cause


def thread_in_collective(rank):
    """A thread of the script reduces, and the main thread of rank 1 joins one that never comes."""
    if rank == 1:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        [thread for thread in threading.enumerate() if thread is not threading.main_thread()][-1].join()  # cause
    dist.all_reduce(torch.ones(3))  # waits


def before_the_group(rank):
    """Rank 1 downloads its data before init_process_group."""


WAYS = {name: value for name, value in list(globals().items()) if getattr(value, "__module__", "") == __name__}


def main():
    way = sys.argv[1]
    if way == "before_the_group" and os.environ["RANK"] == "1":
        time.sleep(600)  # cause
    dist.init_process_group("gloo")  # waits
    dist.all_reduce(torch.ones(2))
    WAYS[way](dist.get_rank())


if __name__ == "__main__":
    main()
