"""Sharded training of a small decoder on a synthetic copy task."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, DIM, HEADS, LAYERS, HALF = 24, 48, 4, 2, 8


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.ff = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, DIM))
        return x + self.ff(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Parameter(torch.randn(2 * HALF, DIM) * 0.02)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos[: ids.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def batches(n, size, gen):
    # the alphabet is skewed, the second half repeats the first
    weights = 1.0 / torch.arange(1, VOCAB + 1)
    for _ in range(n):
        first = torch.multinomial(weights, size * HALF, replacement=True, generator=gen).view(size, HALF)
        yield torch.cat([first, first], 1)


def param_groups(model, weight_decay):
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [
        {"params": decay, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]


def shard(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(0)
    model = Decoder()
    if rank == 0:
        print(f"{sum(p.numel() for p in model.parameters()) / 1e3:.1f}k parameters")

    shard(model, mesh)
    optimizer = torch.optim.AdamW(param_groups(model, 0.1), lr=3e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=5)

    gen = torch.Generator().manual_seed(100 + rank)
    model.train()
    for step, ids in enumerate(batches(int(os.environ.get("STEPS", 40)), 16, gen), 1):
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        model.zero_grad()
        if step % 10 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                lr = scheduler.get_last_lr()[0]
                print(f"step {step:3d} loss {shown.item() / world:.4f} lr {lr:.1e}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
