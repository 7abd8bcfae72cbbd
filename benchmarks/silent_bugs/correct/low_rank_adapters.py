"""Adapters of low rank on frozen layers, two groups of parameters, and a loss of two weighted terms."""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Adapted(nn.Module):
    def __init__(self, linear, rank=4):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden):
        return self.linear(hidden) + self.up(self.down(hidden))


def build():
    torch.manual_seed(0)
    return nn.Sequential(Adapted(nn.Linear(24, 48)), nn.GELU(), Adapted(nn.Linear(48, 48)), nn.GELU(), nn.Linear(48, 6))


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(build())
    adapters = [p for name, p in model.named_parameters() if p.requires_grad and ("up" in name or "down" in name)]
    head = list(model.module[-1].parameters())
    optimizer = torch.optim.AdamW([{"params": adapters, "lr": 1e-2}, {"params": head, "lr": 3e-3, "weight_decay": 0.1}])
    for step in range(40):
        generator = torch.Generator().manual_seed(step)
        features = torch.randn(64, 24, generator=generator).chunk(world_size)[rank]
        logits = model(features)
        fit = F.cross_entropy(logits, features[:, :6].argmax(1))
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        loss = fit - 0.01 * entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step} loss {loss.item():.6f} fit {fit.item():.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
