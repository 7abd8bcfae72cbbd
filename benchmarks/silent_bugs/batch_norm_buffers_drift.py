"""DDP is told not to broadcast buffers, so each rank keeps batch-norm statistics of its own and is evaluated with them.

Reported: https://github.com/pytorch/pytorch/issues/13711
          https://github.com/open-mmlab/mmdetection/issues/2539
          https://github.com/mlcommons/training/issues/289
Wrong: the same image gets another answer on each rank; the checkpoint of rank 0 is not the model that was evaluated.
Kind: script
Expected: replicas.buffers
Right: broadcast_buffers=True, or the buffers of rank 0 are broadcast before the evaluation
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RIGHT = "--right" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    images = torch.rand(320, 1, 8, 8)
    labels = images.sum((1, 2)).argmax(1)
    dataset = TensorDataset(images[:256], labels[:256])
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 32 // world_size, sampler=sampler)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 8))
    model = DistributedDataParallel(model, broadcast_buffers=RIGHT)  # <- the mistake
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            held_out = F.cross_entropy(model(images[256:]), labels[256:])
        print(f"rank {rank} epoch {epoch} held-out loss {held_out:.6f}", flush=True)
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
