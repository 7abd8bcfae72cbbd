"""Image tiles from shards: the list of shards is shuffled every epoch, split over the nodes, then read in order
through a shuffle buffer, as a webdataset / streaming datasets pipeline does it."""
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

NUM_SHARDS = 16
SHARD_SIZE = 64
CLASSES = 8


def write_shards(seed):
    """Each shard comes from one scene: its tiles share a colour cast, and some classes are more common in it."""
    g = torch.Generator().manual_seed(seed)
    prototypes = torch.randn(CLASSES, 3, 8, 8, generator=g)
    shards = []
    for _ in range(NUM_SHARDS):
        cast = 0.5 * torch.randn(1, 3, 1, 1, generator=g)
        freq = torch.rand(CLASSES, generator=g) ** 2 + 0.05
        label = torch.multinomial(freq, SHARD_SIZE, replacement=True, generator=g)
        image = prototypes[label] + cast + 4.0 * torch.randn(SHARD_SIZE, 3, 8, 8, generator=g)
        shards.append((image, label))
    return shards


class ShardStream(IterableDataset):
    def __init__(self, shards, rank, world_size, seed=0, buffer_size=128):
        self.shards = shards
        self.rank, self.world_size = rank, world_size
        self.seed = seed
        self.buffer_size = buffer_size
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def split_by_node(self):
        order = list(range(len(self.shards)))
        random.Random(self.seed + self.epoch).shuffle(order)
        return order[self.rank::self.world_size]

    def read(self):
        for s in self.split_by_node():
            image, label = self.shards[s]
            for i in range(len(label)):
                yield image[i], label[i]

    def __iter__(self):
        rng = random.Random(1000 * self.seed + 10 * self.epoch + self.rank)
        buffer = []
        for sample in self.read():
            buffer.append(sample)
            if len(buffer) >= self.buffer_size:
                yield buffer.pop(rng.randrange(len(buffer)))
        rng.shuffle(buffer)
        yield from buffer


class TileNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.head = nn.Linear(32 * 16, CLASSES)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return self.head(x.flatten(1))


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    all_shards = write_shards(seed=3)
    train = ShardStream(all_shards, rank, world_size, seed=5)
    # every process gets the same number of whole batches, the shards are of one size
    loader = DataLoader(train, batch_size=32, drop_last=True)

    net = DDP(TileNet())
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)

    for epoch in range(6):
        train.set_epoch(epoch)
        stats = torch.zeros(3)
        for image, label in loader:
            logits = net(image)
            loss = F.cross_entropy(logits, label)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            hits = (logits.argmax(1) == label).sum().item()
            stats += torch.tensor([loss.item() * len(label), hits, len(label)])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} | loss {stats[0] / stats[2]:.3f} | acc {stats[1] / stats[2]:.3f} "
                  f"| {int(stats[2])} tiles", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
