"""3D U-Net style segmentation of small synthetic CT volumes.

torchrun --standalone --nproc-per-node 2 volumes_seg.py
"""
import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=11)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch_size", type=int, default=4)
parser.add_argument("--lr", type=float, default=2e-3)
args = parser.parse_args()


def setup_seeds(master_seed, epochs, world_size):
    """Seeds for the workers and for the shuffling of every epoch, the same lists on every process."""
    rng = random.Random(master_seed)
    worker_seeds = [rng.randint(0, 2**31) for _ in range(world_size)]
    shuffling_seeds = [rng.randint(0, 2**31) for _ in range(epochs)]
    return worker_seeds, shuffling_seeds


def seed_everything(seed):
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class Volumes(Dataset):
    """Blobs of a random size in noise; random flips and brightness when training."""

    def __init__(self, n, seed, augment):
        g = torch.Generator().manual_seed(seed)
        grid = torch.stack(torch.meshgrid(*[torch.arange(12.0)] * 3, indexing="ij"))
        centers = 3 + 6 * torch.rand(n, 3, generator=g)
        radius = 2 + 2 * torch.rand(n, generator=g)
        dist2 = ((grid[None] - centers[:, :, None, None, None]) ** 2).sum(1)
        self.label = (dist2 < radius[:, None, None, None] ** 2).float()
        self.image = self.label * 1.5 + torch.randn(n, 12, 12, 12, generator=g)
        self.augment = augment

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        image, label = self.image[i], self.label[i]
        if self.augment:
            axes = [a for a in range(3) if random.random() < 1 / 3]
            image, label = image.flip(axes), label.flip(axes)
            image = image * (1 + np.random.uniform(-0.3, 0.3))
        return image[None].float(), label[None]


class SmallUNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv3d(1, c, 3, padding=1), nn.InstanceNorm3d(c, affine=True), nn.ReLU())
        self.down = nn.Sequential(nn.Conv3d(c, 2 * c, 3, stride=2, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose3d(2 * c, c, 2, stride=2)
        self.out = nn.Conv3d(2 * c, 1, 1)

    def forward(self, x):
        e = self.enc(x)
        return self.out(torch.cat([e, self.up(self.down(e))], dim=1))


def dice(prob, label, eps=1.0):
    inter = (prob * label).sum(dim=(1, 2, 3, 4))
    return (2 * inter + eps) / (prob.sum(dim=(1, 2, 3, 4)) + label.sum(dim=(1, 2, 3, 4)) + eps)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    worker_seeds, shuffling_seeds = setup_seeds(args.seed, args.epochs, world_size)
    worker_seed = worker_seeds[rank]
    seed_everything(worker_seed)

    train_dataset = Volumes(160, seed=1, augment=True)
    val_dataset = Volumes(30, seed=2, augment=False)
    train_sampler = DistributedSampler(train_dataset, seed=shuffling_seeds[0], drop_last=True)
    loader = DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler, drop_last=True)

    model = DDP(SmallUNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(2)
        for image, label in loader:
            logits = model(image)
            loss = F.binary_cross_entropy_with_logits(logits, label) + (1 - dice(logits.sigmoid(), label)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)

        # every process takes its own volumes, the sums are added up
        model.eval()
        score = torch.zeros(2)
        with torch.no_grad():
            for i in range(rank, len(val_dataset), world_size):
                image, label = val_dataset[i]
                pred = (model.module(image[None]) > 0).float()
                score += torch.tensor([dice(pred, label[None]).item(), 1.0])
        dist.all_reduce(score)
        if rank == 0:
            print(f"epoch {epoch} train_loss {total[0] / total[1]:.4f} val_dice {score[0] / score[1]:.4f}", flush=True)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
