"""A worker_init_fn gives every loader worker on every rank one seed, so they all draw the same augmentations.

Reported: https://github.com/pytorch/pytorch/issues/5059
          https://github.com/facebookresearch/fairseq/issues/1383
          https://github.com/xingyizhou/CenterNet/issues/233
Wrong: the shifts of one worker are those of all others, and every epoch starts with the same ones again.
Kind: script
Expected: random.workers
Right: seeds come from the worker's own base seed, which torch changes with the worker and the epoch; ranks differ too
"""

import random
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

RIGHT = "--right" in sys.argv
SEED = 42


class Shifted(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.images = torch.rand(128, 8, 8, generator=generator)
        self.labels = self.images.sum(2).argmax(1) // 2

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        shift = random.randrange(8)  # an augmentation: the label does not depend on it
        return self.images[index].roll(shift, 1).flatten(), self.labels[index], shift


def seed_worker(_):
    random.seed(torch.initial_seed() if RIGHT else SEED)  # <- the mistake


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    dataset = Shifted()
    sampler = DistributedSampler(dataset)
    generator = torch.Generator().manual_seed(SEED + rank)
    loader = DataLoader(dataset, 16, sampler=sampler, num_workers=2, worker_init_fn=seed_worker, generator=generator)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        drawn = []
        for images, labels, shifts in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            drawn += shifts[:3].tolist()
        print(f"rank {rank} of {world_size} epoch {epoch} loss {loss:.6f} shifts {drawn[:6]}", flush=True)
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
