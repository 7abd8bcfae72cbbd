"""DDP with gradient accumulation: no_sync round forward and backward, and the incomplete last window divided right."""

import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 3


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    features = torch.randn(256, 12)
    dataset = TensorDataset(features, features[:, :1] * features[:, 1:2])
    sampler = DistributedSampler(dataset, seed=1)
    loader = DataLoader(dataset, 32 // world_size, sampler=sampler)  # 8 batches: windows of 3, 3 and 2
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            first = number - number % ACCUMULATE
            window = min(ACCUMULATE, len(loader) - first)
            is_last = number - first == window - 1
            with nullcontext() if is_last else model.no_sync():
                loss = F.mse_loss(model(inputs), targets)
                (loss / window).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
