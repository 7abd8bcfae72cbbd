"""Curriculum: the pool of admitted samples grows with the epoch, easy ones first, the same pool on all ranks."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


class Sums(Dataset):
    """Add the numbers of a row; the difficulty is their count."""

    def __init__(self, n=320):
        g = torch.Generator().manual_seed(10)
        self.count = torch.randint(1, 9, (n,), generator=g)
        self.x = torch.randn(n, 8, generator=g)
        self.x[torch.arange(8)[None] >= self.count[:, None]] = 0
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class CurriculumSampler(Sampler):
    def __init__(self, difficulty, epochs, batch_size, seed=0):
        self.order = torch.argsort(difficulty, stable=True)
        self.epochs, self.batch_size, self.seed = epochs, batch_size, seed
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def indices(self):
        share = 0.4 + 0.6 * self.epoch / (self.epochs - 1)
        n = int(len(self.order) * share) // (self.batch_size * self.world) * self.batch_size * self.world
        pool = self.order[:n]
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        return pool[torch.randperm(n, generator=g)][self.rank::self.world]

    def __iter__(self):
        return iter(self.indices().tolist())

    def __len__(self):
        return len(self.indices())


def main(epochs=4, batch_size=16):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = Sums()
    sampler = CurriculumSampler(data.count, epochs, batch_size)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {len(sampler)} samples a rank, loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
