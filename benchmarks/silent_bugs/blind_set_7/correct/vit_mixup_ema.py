"""Tiny vision transformer: mixup, bf16 autocast, warm-up and cosine, EMA weights for validation."""
import copy
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CLASSES, SIZE, PATCH = 5, 16, 4


def textures(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    grid = torch.arange(SIZE, dtype=torch.float32)
    angle = math.pi * y / CLASSES
    phase = 2 * math.pi * torch.rand(n, 1, 1, generator=g)
    wave = grid[None, :, None] * torch.cos(angle)[:, None, None] + grid[None, None] * torch.sin(angle)[:, None, None]
    x = torch.sin(1.3 * wave + phase) + 0.6 * torch.randn(n, SIZE, SIZE, generator=g)
    return TensorDataset(x[:, None], y)


class ViT(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, PATCH, stride=PATCH)
        self.pos = nn.Parameter(0.02 * torch.randn((SIZE // PATCH) ** 2, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, CLASSES)

    def forward(self, x):
        h = self.patch(x).flatten(2).transpose(1, 2) + self.pos
        return self.head(self.norm(self.body(h)).mean(1))


class EMA:
    def __init__(self, model, decay):
        self.model, self.decay = copy.deepcopy(model).eval().requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.model.parameters(), model.parameters()):
            e.lerp_(p, 1 - self.decay)


def mixup(x, y, alpha=0.2):
    lam = float(torch.distributions.Beta(alpha, alpha).sample())
    perm = torch.randperm(len(x))
    target = F.one_hot(y, CLASSES).float()
    return lam * x + (1 - lam) * x[perm], lam * target + (1 - lam) * target[perm]


@torch.no_grad()
def validate(model, loader):
    sums = torch.zeros(3)
    for x, y in loader:
        logits = model(x)
        sums += torch.stack([F.cross_entropy(logits, y, reduction="sum"), (logits.argmax(1) == y).sum().float(),
                             torch.tensor(float(len(y)))])
    dist.all_reduce(sums)
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def main(seed=12, epochs=5):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    train, val = textures(640, 1), textures(153, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=seed, drop_last=True)
    loader = DataLoader(train, batch_size=32, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=64)

    torch.manual_seed(seed)
    model = DDP(ViT())
    ema = EMA(model.module, decay=0.9)
    torch.manual_seed(seed + 1000 * (rank + 1))  # dropout and mixup
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}], lr=3e-3)
    total, warmup = epochs * len(loader), len(loader) // 2
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / warmup) * 0.5 * (
        1 + math.cos(math.pi * s / total)))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(2)
        for x, y in loader:
            x, target = mixup(x, y)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(x)
            loss = F.cross_entropy(logits.float(), target)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            ema.update(model.module)
            running += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(running)
        val_loss, acc = validate(ema.model, val_loader)
        if rank == 0:
            print(f"epoch {epoch} train {running[0] / running[1]:.4f} ema val {val_loss:.4f} acc {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
