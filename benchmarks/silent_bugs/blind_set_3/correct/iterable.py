"""IterableDataset split over ranks and loader workers, reshuffled by epoch."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Shards(IterableDataset):
    """Sixteen shards of twenty-four samples; a shard belongs to one worker of one rank."""

    def __init__(self, rank, world, num_shards=16, shard_size=24, seed=0):
        self.rank, self.world, self.num_shards, self.shard_size, self.seed = rank, world, num_shards, shard_size, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def read(self, shard):
        g = torch.Generator().manual_seed(5000 + shard)
        for _ in range(self.shard_size):
            label = int(torch.randint(0, 3, (1,), generator=g))
            yield torch.randn(12, generator=g) + label * (torch.arange(12) % 3 == label), label

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.num_shards, generator=g).tolist()
        mine = order[self.rank::self.world]
        info = get_worker_info()
        if info is not None:
            mine = mine[info.id::info.num_workers]
        for shard in mine:
            yield from self.read(shard)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dataset = Shards(rank, world)
    loader = DataLoader(dataset, batch_size=16, num_workers=args.workers)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3)))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(args.epochs):
        dataset.set_epoch(epoch)
        sums = torch.zeros(2)
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            sums += torch.tensor([loss.item() * len(y), len(y)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: loss {(sums[0] / sums[1]).item():.4f} over {int(sums[1])} samples")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
