"""Leaf images: CNN, DDP, warmup + cosine, label smoothing, confusion matrix, best checkpoint."""
import math
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

CLASSES, EPOCHS, BATCH, LR = 6, 6, 32, 4e-3


class Leaves(Dataset):
    def __init__(self, n, seed, augment=False):
        g = torch.Generator().manual_seed(seed)
        proto = torch.randn(CLASSES, 3, 12, 12, generator=torch.Generator().manual_seed(8))
        self.y = torch.randint(0, CLASSES, (n,), generator=g)
        self.x = proto[self.y] + 3.0 * torch.randn(n, 3, 12, 12, generator=g)
        self.augment = augment

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i]
        if self.augment:
            x = torch.roll(x, int(torch.randint(-1, 2, ())), dims=2) * (0.9 + 0.2 * torch.rand(()))
        return x, self.y[i]


def make_model():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 36, CLASSES),
    )


@torch.no_grad()
def confusion(model, loader):
    model.eval()
    matrix = torch.zeros(CLASSES, CLASSES, dtype=torch.long)
    for x, y in loader:
        pred = model(x).argmax(1)
        matrix += torch.bincount(y * CLASSES + pred, minlength=CLASSES ** 2).view(CLASSES, CLASSES)
    model.train()
    dist.all_reduce(matrix)
    return matrix


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train_set, val_set = Leaves(768, seed=1, augment=True), Leaves(251, seed=2)
    sampler = DistributedSampler(train_set, seed=5)
    train_loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=64)

    torch.manual_seed(5)
    model = DDP(make_model())
    torch.manual_seed(100 + rank)      # augmentation and dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05)
    total, warmup = EPOCHS * len(train_loader), len(train_loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: (s + 1) / warmup if s < warmup
        else 0.5 * (1 + math.cos(math.pi * (s - warmup) / (total - warmup))))

    best, folder = 0.0, tempfile.mkdtemp() if rank == 0 else None
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        loss_sum = torch.zeros(())
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)
        matrix = confusion(model, val_loader)
        acc = matrix.diag().sum().item() / matrix.sum().item()
        recall = (matrix.diag() / matrix.sum(1).clamp(min=1)).mean().item()
        if rank == 0:
            print(f"epoch {epoch}  loss {loss_sum.item() / world / len(train_loader):.4f}  acc {acc:.4f}  mean recall {recall:.4f}")
            if acc > best:
                torch.save({"model": model.module.state_dict(), "epoch": epoch}, os.path.join(folder, "best.pt"))
        best = max(best, acc)

    if rank == 0:
        print(f"best acc {best:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
