import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def off_diagonal(m):
    n = m.shape[0]
    return m.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()


class CorrelationLoss(nn.Module):
    def __init__(self, weight=5e-2):
        super().__init__()
        self.weight = weight

    def forward(self, za, zb):
        world = dist.get_world_size()
        scale = za.shape[1] / (za.shape[0] * world)
        c = F.normalize(za, dim=1).t() @ F.normalize(zb, dim=1) * scale
        c = torch.distributed.nn.all_reduce(c)
        on = (c.diagonal() - 1).pow(2).sum()
        return on + self.weight * off_diagonal(c).pow(2).sum()


class Encoder(nn.Module):
    def __init__(self, dim=16, out=12):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(dim, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.projector = nn.Linear(48, out)

    def forward(self, x):
        return self.projector(self.backbone(x))


def augment(x, g):
    keep = (torch.rand(x.shape, generator=g) > 0.2).float()
    return x * keep + 0.1 * torch.randn(x.shape, generator=g)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Encoder())
    criterion = CorrelationLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    g = torch.Generator().manual_seed(500 + rank)
    for step in range(24):
        x = torch.randn(24, 16, generator=g)
        za, zb = model(torch.cat([augment(x, g), augment(x, g)])).chunk(2)
        loss = criterion(za, zb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 6 == 5:
            print(f"step {step + 1} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
