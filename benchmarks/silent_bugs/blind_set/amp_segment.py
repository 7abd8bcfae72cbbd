"""Binary segmentation with half precision, 2 processes.

usage: torchrun --standalone --nproc-per-node 2 amp_segment.py
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EPOCHS = 3
BATCH = 8
LR = 0.2
MAX_NORM = 1.0


class Blobs(Dataset):
    """Images with one bright disc each; the mask is the disc."""

    def __init__(self, n, size=24, seed=0):
        self.n, self.size, self.seed = n, size, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100003 + i)
        c = torch.rand(2, generator=g) * self.size
        r = 3 + 5 * torch.rand((), generator=g)
        yy, xx = torch.meshgrid(torch.arange(self.size), torch.arange(self.size), indexing="ij")
        mask = ((yy - c[0]) ** 2 + (xx - c[1]) ** 2 < r**2).float()
        image = mask + 0.6 * torch.randn(self.size, self.size, generator=g)
        return image[None], mask[None]


class TinyUNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.enc1 = nn.Conv2d(1, c, 3, padding=1)
        self.enc2 = nn.Conv2d(c, 2 * c, 3, padding=1)
        self.up = nn.Conv2d(2 * c, c, 3, padding=1)
        self.out = nn.Conv2d(2 * c, 1, 1)

    def forward(self, x):
        a = F.relu(self.enc1(x))
        b = F.relu(self.enc2(F.avg_pool2d(a, 2)))
        b = F.interpolate(F.relu(self.up(b)), scale_factor=2)
        return self.out(torch.cat([a, b], 1))


def dice(logits, mask):
    pred = (logits > 0).float()
    return 2 * (pred * mask).sum(), pred.sum() + mask.sum()


def train_one_epoch(model, loader, optimizer, scaler):
    model.train()
    total, seen = 0.0, 0
    for image, mask in loader:
        optimizer.zero_grad(set_to_none=True)
        with autocast("cpu", dtype=torch.float16):
            logits = model(image)
            loss = F.binary_cross_entropy_with_logits(logits.float(), mask)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        total += loss.item() * len(image)
        seen += len(image)
    stats = torch.tensor([total, seen])
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


@torch.no_grad()
def evaluate(model, dataset, rank, world):
    model.eval()
    sums = torch.zeros(2)
    for i in range(rank, len(dataset), world):
        image, mask = dataset[i]
        inter, union = dice(model.module(image[None]), mask[None])
        sums += torch.stack([inter, union])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)

    train_set, val_set = Blobs(160, seed=1), Blobs(40, seed=2)
    sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler)

    model = DDP(TinyUNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    scaler = GradScaler("cpu", init_scale=2.0**14)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(model, loader, optimizer, scaler)
        score = evaluate(model, val_set, rank, world)
        if rank == 0:
            print(f"epoch {epoch}  loss {loss:.4f}  dice {score:.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
