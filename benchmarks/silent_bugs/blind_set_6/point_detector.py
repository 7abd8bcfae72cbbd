"""Anchor-free detector (centre points and box sizes on a feature grid) on synthetic scenes."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

GRID = 8          # feature cells per side
STRIDE = 4        # pixels per cell


class Scenes(Dataset):
    """Gray rectangles on noise; the number of objects per picture runs from 0 to 9 and is mostly small."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        side = GRID * STRIDE
        self.images = 0.3 * torch.randn(n, 1, side, side, generator=g)
        self.heat = torch.zeros(n, GRID, GRID)
        self.size = torch.zeros(n, 2, GRID, GRID)
        for i in range(n):
            count = int(10 * torch.rand(1, generator=g) ** 3)
            for _ in range(count):
                cy, cx = torch.randint(0, GRID, (2,), generator=g).tolist()
                h, w = torch.randint(3, 9, (2,), generator=g).tolist()
                y, x = cy * STRIDE + 2, cx * STRIDE + 2
                y0, x0 = max(y - h // 2, 0), max(x - w // 2, 0)
                self.images[i, 0, y0:y + (h + 1) // 2, x0:x + (w + 1) // 2] += 1.0
                self.heat[i, cy, cx] = 1
                self.size[i, :, cy, cx] = torch.tensor([h, w]) / STRIDE

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.heat[i], self.size[i]


class Detector(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, ch, 5, stride=2, padding=2), nn.GroupNorm(4, ch), nn.SiLU(),
            nn.Conv2d(ch, ch, 3, stride=2, padding=1), nn.GroupNorm(4, ch), nn.SiLU(),
            nn.Conv2d(ch, ch, 3, padding=1), nn.SiLU(),
        )
        self.heat = nn.Conv2d(ch, 1, 1)
        self.size = nn.Conv2d(ch, 2, 1)
        nn.init.constant_(self.heat.bias, -2.2)

    def forward(self, x):
        f = self.stem(x)
        return self.heat(f)[:, 0], self.size(f)


def focal(logit, target, gamma=2.0):
    p = logit.sigmoid()
    ce = F.binary_cross_entropy_with_logits(logit, target, reduction="none")
    weight = torch.where(target > 0, (1 - p) ** gamma, p ** gamma)
    return (weight * ce).sum()


def positives(heat):
    """Positives per process, averaged over the processes, as the divisor of the losses."""
    num_pos = heat.sum()
    dist.all_reduce(num_pos)
    return num_pos.clamp(min=1.0) / dist.get_world_size()


def criterion(pred_heat, pred_size, heat, size):
    avg_factor = positives(heat)
    cls_loss = focal(pred_heat, heat) / avg_factor
    mask = heat[:, None]
    box_loss = (F.l1_loss(pred_size, size, reduction="none") * mask).sum() / avg_factor
    return cls_loss, box_loss


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch", type=int, default=16, help="pictures per update, over all processes")
    ap.add_argument("--lr", type=float, default=0.02)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)

    data = Scenes(384, seed=10)
    sampler = DistributedSampler(data, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=args.batch // world, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(Detector())
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    warmup = torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.1, total_iters=10)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        log = torch.zeros(3)
        for images, heat, size in loader:
            cls_loss, box_loss = criterion(*model(images), heat, size)
            loss = cls_loss + 0.5 * box_loss
            opt.zero_grad()
            loss.backward()
            opt.step()
            warmup.step()
            log += torch.tensor([cls_loss.item(), box_loss.item(), 1.0])
        dist.all_reduce(log)
        if rank == 0:
            print(f"epoch {epoch}  cls {log[0] / log[2]:.4f}  box {log[1] / log[2]:.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
