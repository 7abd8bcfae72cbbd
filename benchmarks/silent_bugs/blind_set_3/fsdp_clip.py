"""Preference tuning (DPO-like) of a small scorer under FSDP, gradients clipped."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MAX_GRAD_NORM = 0.5


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Scorer(nn.Module):
    def __init__(self, dim=32, depth=2):
        super().__init__()
        self.inp = nn.Linear(16, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x).squeeze(-1)


class BasicTrainer:
    def __init__(self, policy, loader, fsdp=True):
        self.fsdp, self.loader = fsdp, loader
        self.policy = FSDP(policy, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"))
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.2)

    def clip_gradient(self):
        return self.policy.clip_grad_norm_(MAX_GRAD_NORM).item()

    def loss(self, chosen, rejected):
        scores = self.policy(torch.cat([chosen, rejected]))
        good, bad = scores.chunk(2)
        return -F.logsigmoid(2.0 * (good - bad)).mean()

    def train(self, epochs):
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            for chosen, rejected in self.loader:
                self.optimizer.zero_grad()
                loss = self.loss(chosen, rejected)
                loss.backward()
                norm = self.clip_gradient()
                self.optimizer.step()
            if dist.get_rank() == 0:
                print(f"epoch {epoch} loss {loss.item():.4f} grad norm {norm:.3f}")


def pairs(n=320):
    g = torch.Generator().manual_seed(3)
    w = torch.randn(16, generator=g)
    a, b = torch.randn(n, 16, generator=g) * 2, torch.randn(n, 16, generator=g) * 2
    swap = (a @ w < b @ w)[:, None]
    return TensorDataset(torch.where(swap, b, a), torch.where(swap, a, b))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = pairs()
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
    BasicTrainer(Scorer(), loader).train(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
