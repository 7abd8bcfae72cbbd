"""bfloat16 autocast with float32 loss and norms, clipping, OneCycle."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MixerBlock(nn.Module):
    def __init__(self, patches, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.channel = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.token(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, dim=32, classes=4):
        super().__init__()
        self.embed = nn.Conv2d(1, dim, 4, 4)
        self.blocks = nn.Sequential(MixerBlock(9, dim), MixerBlock(9, dim))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(x).mean(1))


def glyphs(n=256):
    g = torch.Generator().manual_seed(33)
    proto = torch.rand(4, 1, 12, 12, generator=g)
    y = torch.randint(0, 4, (n,), generator=g)
    return TensorDataset(proto[y] + 0.5 * torch.randn(n, 1, 12, 12, generator=g), y)


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = glyphs()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    model = DDP(Mixer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    epochs = 3
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=epochs * len(loader))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
                logits = model(x)
            loss = F.cross_entropy(logits.float(), y, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        value = loss.detach().clone()
        dist.all_reduce(value)
        if rank == 0:
            print(f"epoch {epoch} loss {value.item() / world:.4f} lr {scheduler.get_last_lr()[0]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
