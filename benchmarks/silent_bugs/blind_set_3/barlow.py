"""Barlow Twins with the cross-correlation taken over all ranks."""
import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class BarlowTwinsLoss(nn.Module):
    def __init__(self, lambda_param=5e-3, gather_distributed=False):
        super().__init__()
        self.lambda_param, self.gather_distributed = lambda_param, gather_distributed

    def forward(self, z_a, z_b):
        n = z_a.size(0)
        c = z_a.T @ z_b / n
        if self.gather_distributed and dist.get_world_size() > 1:
            c = c / dist.get_world_size()
            c = torch.distributed.nn.all_reduce(c)
        on_diagonal = (torch.diagonal(c) - 1).pow(2).sum()
        off_diagonal = c.pow(2).sum() - torch.diagonal(c).pow(2).sum()
        return on_diagonal + self.lambda_param * off_diagonal


class Twin(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.projector = nn.Linear(64, dim)
        self.dim = dim

    def embed(self, x):
        z = self.projector(self.backbone(x))
        return nn.functional.normalize(z, dim=1) * self.dim ** 0.5

    def forward(self, x_a, x_b):
        return self.embed(x_a), self.embed(x_b)


def augment(x, g):
    keep = (torch.rand(x.shape, generator=g) > 0.2).float()
    return x * keep + 0.1 * torch.randn(x.shape, generator=g)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    base = torch.randn(6, 20)
    data = TensorDataset(base[torch.randint(0, 6, (320,))] + 0.3 * torch.randn(320, 20))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DDP(Twin())
    criterion = BarlowTwinsLoss(gather_distributed=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    g = torch.Generator().manual_seed(50 + rank)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            z_a, z_b = model(augment(x, g), augment(x, g))
            loss = criterion(z_a, z_b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
