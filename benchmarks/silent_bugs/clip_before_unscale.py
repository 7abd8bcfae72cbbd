"""Gradients are clipped while they still carry the factor of the loss scaler.

Reported: https://github.com/pytorch/examples/issues/1196
          https://github.com/Lightning-AI/pytorch-lightning/issues/9330
          https://github.com/rwth-i6/returnn/issues/1590
Wrong: gradients of norm 65536 x g are clipped to 1 and divided by 65536 afterwards: training all but stands still.
Kind: script
Expected: clip.scaled
Right: scaler.unscale_(optimizer) before the clipping
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
    images = torch.rand(256, 64)
    dataset = TensorDataset(images, images.view(256, 8, 8).sum(1).argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 32 // world_size, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if RIGHT:
                scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <- the mistake
            scaler.step(optimizer)
            scaler.update()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total / len(loader) / world_size:.6f} gradient norm {norm:.4f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
