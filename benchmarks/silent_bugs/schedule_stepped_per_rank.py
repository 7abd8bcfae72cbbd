"""The learning-rate schedule is stepped once for each rank after every update.

Reported: https://github.com/huggingface/accelerate/issues/2142
          https://github.com/huggingface/diffusers/issues/3954
          https://github.com/huggingface/transformers/pull/24088
Wrong: the schedule, made for the number of updates, ends after 1 / world_size of them; the rest trains at zero.
Kind: script
Expected: schedule.often
Right: one step of the schedule for one update
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
EPOCHS = 4


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    images = torch.rand(256, 64)
    dataset = TensorDataset(images, images.view(256, 8, 8).sum(1).argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 32 // world_size, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    updates = EPOCHS * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / updates))
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for _ in range(1 if RIGHT else world_size):
                schedule.step()  # <- the mistake
        average = loss.detach() / world_size
        dist.all_reduce(average)
        if rank == 0:
            print(f"epoch {epoch} loss {average:.6f} learning rate {schedule.get_last_lr()[0]:.4f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
