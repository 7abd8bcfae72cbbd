import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class LoRALayer(nn.Module):
    def __init__(self, target, rank, alpha):
        super().__init__()
        self.down = nn.Linear(target.in_features, rank, bias=False)
        self.up = nn.Linear(rank, target.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.scale = alpha / rank

    def attach(self, target):
        original = target.forward
        target.forward = lambda x: original(x) + self.scale * self.up(self.down(x))


class LoRANetwork(nn.Module):
    """One low-rank layer for every linear layer of the base model."""

    def __init__(self, base, rank=4, alpha=4):
        super().__init__()
        self.names = [n for n, m in base.named_modules() if isinstance(m, nn.Linear)]
        self.layers = nn.ModuleList(LoRALayer(base.get_submodule(n), rank, alpha) for n in self.names)

    def apply_to(self, base):
        for name, layer in zip(self.names, self.layers):
            layer.attach(base.get_submodule(name))


class UNet(nn.Module):
    def __init__(self, size=32, width=64):
        super().__init__()
        self.inp, self.time = nn.Linear(size, width), nn.Linear(1, width)
        self.mid, self.out = nn.Linear(width, width), nn.Linear(width, size)

    def forward(self, x, t):
        h = torch.nn.functional.silu(self.inp(x) + self.time(t))
        return self.out(torch.nn.functional.silu(self.mid(h)) + h)


def pictures(style, count, g):
    return style + 0.2 * torch.randn(count, style.numel(), generator=g)


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    style = torch.randn(32)
    unet = UNet().requires_grad_(False)
    network = DDP(LoRANetwork(unet, args.rank))
    network.module.apply_to(unet)
    optimizer = torch.optim.AdamW(network.parameters(), lr=args.lr)
    g = torch.Generator().manual_seed(args.seed + 1 + rank)
    for step in range(args.steps):
        clean = pictures(style, args.batch, g)
        t = torch.rand(args.batch, 1, generator=g)
        noise = torch.randn(clean.shape, generator=g)
        loss = nn.functional.mse_loss(unet((1 - t) * clean + t * noise, t), noise - clean)
        optimizer.zero_grad()
        loss.backward()
        for p in network.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}/{args.steps} on {world} processes: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=5)
    main(parser.parse_args())
