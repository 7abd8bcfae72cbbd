import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


class GatherLayer(torch.autograd.Function):
    """all_gather whose backward sends the gradients home."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return tuple(parts)

    @staticmethod
    def backward(ctx, *grads):
        stacked = torch.stack(grads)
        dist.all_reduce(stacked)
        return stacked[dist.get_rank()]


def gather(z):
    parts = list(GatherLayer.apply(z))
    return torch.cat(parts)


class Encoder(nn.Module):
    def __init__(self, d_a=20, d_b=14, dim=16):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(d_a, 48), nn.ReLU(), nn.Linear(48, dim))
        self.b = nn.Sequential(nn.Linear(d_b, 48), nn.ReLU(), nn.Linear(48, dim))

    def forward(self, a, b):
        return F.normalize(self.a(a), dim=-1), F.normalize(self.b(b), dim=-1)


def pairs(n=256):
    g = torch.Generator().manual_seed(7)
    latent = torch.randn(n, 6, generator=g)
    a = latent @ torch.randn(6, 20, generator=g) + 0.1 * torch.randn(n, 20, generator=g)
    b = latent @ torch.randn(6, 14, generator=g) + 0.1 * torch.randn(n, 14, generator=g)
    return TensorDataset(a, b)


def info_nce(za, zb, temperature=0.2):
    # my rows against everybody's columns, in both directions
    all_a, all_b = gather(za), gather(zb)
    target = torch.arange(len(za)) + dist.get_rank() * len(za)
    left = F.cross_entropy(za @ all_b.t() / temperature, target)
    right = F.cross_entropy(zb @ all_a.t() / temperature, target)
    return 0.5 * (left + right)


def run(epochs=3, global_batch=64):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = pairs()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=global_batch // world, sampler=sampler, drop_last=True)
    net = DDP(Encoder())
    opt = torch.optim.SGD(net.parameters(), lr=0.5)
    for ep in range(epochs):
        sampler.set_epoch(ep)
        total = torch.zeros(())
        for a, b in loader:
            za, zb = net(a, b)
            loss = info_nce(za, zb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print("epoch", ep, "info-nce %.5f" % (total / world / len(loader)).item())
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
