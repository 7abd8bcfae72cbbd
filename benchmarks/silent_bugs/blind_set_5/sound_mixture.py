import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def waves(pitch, count, g):
    t = torch.linspace(0, 1, 64)
    f = pitch + 2 * torch.rand(count, 1, generator=g)
    phase = 6.3 * torch.rand(count, 1, generator=g)
    return (6.3 * f * t + phase).sin() + 0.5 * torch.randn(count, 64, generator=g)


class Mixture(IterableDataset):
    """An endless mixture of sources; each source is a list of shards."""

    def __init__(self, sources, weights, seed):
        self.sources, self.weights, self.seed = sources, weights, seed

    def shards(self):
        rng = random.Random(f"{self.seed}/{os.environ['RANK']}/{get_worker_info().id}")
        while True:
            label = rng.choices(range(len(self.sources)), self.weights)[0]
            yield label, rng.choice(self.sources[label])

    def __iter__(self):
        worker = get_worker_info().id
        for label, shard in self.shards():
            for row in shard:
                yield row, label, worker


class Listener(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(1, 16, 9, stride=2), nn.ReLU(), nn.Conv1d(16, 24, 5, stride=2), nn.ReLU(), nn.AdaptiveMaxPool1d(4)
        )
        self.head = nn.Linear(96, classes)

    def forward(self, x):
        return self.head(self.conv(x.unsqueeze(1)).flatten(1))


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    g = torch.Generator().manual_seed(1)
    sources = [[waves(p, 4, g) for _ in range(6)] for p in (3, 6, 9)]
    loader = DataLoader(Mixture(sources, [0.5, 0.3, 0.2], seed=10), batch_size=16, num_workers=2)
    torch.manual_seed(rank)
    model = DDP(Listener(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    stream = iter(loader)
    for step in range(40):
        x, label, worker = next(stream)
        loss = nn.functional.cross_entropy(model(x), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.4f} (worker {worker[0].item()})")
    del stream
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
