"""GRU over sequences of different lengths; batches of like length, split over the ranks by batch."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset


class Sequences(Dataset):
    def __init__(self, n=256):
        g = torch.Generator().manual_seed(2)
        self.lengths = torch.randint(5, 25, (n,), generator=g).tolist()
        self.rows = []
        for k, length in enumerate(self.lengths):
            x = torch.randn(length, 6, generator=g)
            self.rows.append((x, int(x[:, 0].sum() > 0)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class BucketBatchSampler:
    """Batches of neighbouring length in an order that depends on the epoch; rank r takes every world-th batch."""

    def __init__(self, lengths, batch_size, rank, world, seed=0):
        self.lengths, self.batch_size = lengths, batch_size
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.lengths) // (self.batch_size * self.world)

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        noise = torch.rand(len(self.lengths), generator=g) * 4
        order = torch.argsort(torch.tensor(self.lengths) + noise).tolist()
        batches = [order[i:i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        batches = [batches[i] for i in torch.randperm(len(batches), generator=g).tolist()]
        n = len(self) * self.world
        yield from batches[self.rank:n:self.world]


def collate(rows):
    xs, ys = zip(*rows)
    return pad_sequence(xs, batch_first=True), torch.tensor([len(x) for x in xs]), torch.tensor(ys)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(6, 24, batch_first=True), nn.Linear(24, 2)

    def forward(self, x, lengths):
        h, _ = self.gru(x)
        return self.head(h[torch.arange(len(x)), lengths - 1])


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1)
    data = Sequences()
    batch_sampler = BucketBatchSampler(data.lengths, 16, rank, world)
    loader = DataLoader(data, batch_sampler=batch_sampler, collate_fn=collate)
    model = nn.parallel.DistributedDataParallel(Tagger())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(4):
        if hasattr(loader.batch_sampler, "set_epoch"):
            loader.batch_sampler.set_epoch(epoch)
        running = 0.0
        for x, lengths, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(x, lengths), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            running += loss.item()
        print(f"[rank {rank}] epoch {epoch} loss {running / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
