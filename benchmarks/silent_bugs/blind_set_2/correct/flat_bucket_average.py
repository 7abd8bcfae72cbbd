"""No DDP at all: an own sampler and one flat gradient buffer that is averaged by hand."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Sampler, TensorDataset


class InterleavedSampler(Sampler):
    def __init__(self, n, rank, world, seed=0):
        assert n % world == 0
        self.n, self.rank, self.world, self.seed, self.epoch = n, rank, world, seed, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        yield from torch.randperm(self.n, generator=g)[self.rank::self.world].tolist()

    def __len__(self):
        return self.n // self.world


def average_gradients(model, world):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= world
    at = 0
    for g in grads:
        g.copy_(flat[at:at + g.numel()].view_as(g))
        at += g.numel()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(384, 5, generator=g)
    y = (x.pow(2).sum(1, keepdim=True) - 5) / 3
    data = TensorDataset(x, y)
    torch.manual_seed(100 + rank)
    model = nn.Sequential(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 1))
    with torch.no_grad():
        for p in model.parameters():
            dist.broadcast(p, src=0)
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = InterleavedSampler(len(data), rank, world)
    loader = DataLoader(data, batch_size=24, sampler=sampler)
    for epoch in range(4):
        sampler.epoch = epoch
        acc = torch.zeros(2)
        for xb, yb in loader:
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(xb), yb)
            loss.backward()
            average_gradients(model, world)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            acc += torch.tensor([loss.item() * len(xb), len(xb)])
        dist.all_reduce(acc)
        if rank == 0:
            print(f"epoch {epoch} mse {(acc[0] / acc[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
