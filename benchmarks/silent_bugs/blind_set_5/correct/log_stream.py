import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def lines(count):
    for n in range(count):
        rng = random.Random(n)
        kind = n % 5
        yield [kind * 6 + rng.randrange(6) for _ in range(8)]


class Stream(IterableDataset):
    """Every reader takes its own lines; all readers stop after equally many, so no rank waits for another."""

    def __init__(self, count, rank, world, epoch=0, buffer=16):
        self.count, self.rank, self.world, self.epoch, self.buffer = count, rank, world, epoch, buffer

    def __iter__(self):
        info = get_worker_info()
        readers, me = self.world * info.num_workers, self.rank * info.num_workers + info.id
        usable = self.count // readers * readers
        rng = random.Random(self.epoch * 1000 + me)
        kept = []
        for n, line in enumerate(lines(usable)):
            if (n + self.epoch) % readers != me:
                continue
            kept.append(line)
            if len(kept) == self.buffer:
                yield kept.pop(rng.randrange(len(kept)))
        rng.shuffle(kept)
        yield from kept


class Autoencoder(nn.Module):
    def __init__(self, tokens=30, width=24):
        super().__init__()
        self.embed, self.squeeze = nn.Embedding(tokens, width), nn.Linear(8 * width, 6)
        self.expand = nn.Linear(6, 8 * tokens)

    def forward(self, ids):
        return self.expand(self.squeeze(self.embed(ids).flatten(1)).tanh()).view(len(ids), 8, -1)


def collate(rows):
    return torch.tensor(rows)


def main(epochs=3, batch=8, count=260):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Autoencoder())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        stream = Stream(count, rank, world, epoch)
        total = torch.zeros(2)
        for ids in DataLoader(stream, batch, num_workers=2, drop_last=True, collate_fn=collate):
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(ids), len(ids)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: {total[0] / total[1]:.4f} on {int(total[1])} lines")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
