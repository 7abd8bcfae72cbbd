import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=16)
args = parser.parse_args()


class Velocity(nn.Module):
    def __init__(self, obs=10, act=4, width=48):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(obs + act + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, act)
        )

    def forward(self, obs, noisy, t):
        return self.net(torch.cat([obs, noisy, t], -1))


def set_seed(seed):
    torch.manual_seed(seed)


def flow_loss(model, obs, action):
    noise = torch.randn_like(action)
    t = torch.rand(len(action), 1)
    t = 1 - (1 - t) ** 1.5
    noisy = t * noise + (1 - t) * action
    return (model(obs, noisy, t) - (noise - action)).pow(2).mean()


dist.init_process_group("gloo")
rank = dist.get_rank()
g = torch.Generator().manual_seed(0)
obs = torch.randn(128, 10, generator=g)
action = torch.tanh(obs @ torch.randn(10, 4, generator=g) / 3)
data = TensorDataset(obs, action)
sampler = DistributedSampler(data, seed=args.seed)
loader = DataLoader(data, args.batch, sampler=sampler)
set_seed(args.seed + rank)
model = DistributedDataParallel(Velocity())
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for bo, ba in loader:
        loss = flow_loss(model, bo, ba)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch} flow loss {loss.item():.4f}")
dist.destroy_process_group()
