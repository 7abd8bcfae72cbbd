"""Gradients are cleared before every micro-batch, so only the last one of each window reaches the optimizer.

Reported: https://github.com/bytetriper/RAE/issues/67
          https://github.com/ZiqiaoPeng/DualTalk/issues/9
          https://github.com/huggingface/accelerate/issues/616
Wrong: three quarters of the data are computed and thrown away; what is left counts for a quarter of what it should.
Kind: script
Expected: gradient.thrown-away
Right: zero_grad() once an update
"""

import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RIGHT = "--right" in sys.argv
ACCUMULATE = 4


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    features = torch.randn(512, 10)
    dataset = TensorDataset(features, (features[:, :2].prod(1, keepdim=True)).sin())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 32 // world_size // ACCUMULATE, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for number, (inputs, targets) in enumerate(loader):
            is_last = number % ACCUMULATE == ACCUMULATE - 1
            with nullcontext() if is_last else model.no_sync():
                loss = F.mse_loss(model(inputs), targets)
                if not RIGHT or number % ACCUMULATE == 0:
                    optimizer.zero_grad()  # <- the mistake
                (loss / ACCUMULATE).backward()
            if is_last:
                optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total / len(loader) / world_size:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
