import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


class ShardedBatches:
    """Batches of one rank, shuffled with seed + epoch."""

    def __init__(self, size, batch, rank, world, seed=0):
        self.size, self.batch, self.rank, self.world = size, batch, rank, world
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.size // (self.world * self.batch)

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.size, generator=g)[self.rank :: self.world]
        for k in range(len(self)):
            yield order[k * self.batch : (k + 1) * self.batch].tolist()


class SkipBatches:
    """Leaves out the first batches once, to go on in the middle of an epoch."""

    def __init__(self, inner, skip):
        self.inner, self.skip = inner, skip

    def __len__(self):
        return len(self.inner) - self.skip

    def __iter__(self):
        skip, self.skip = self.skip, 0
        for k, batch in enumerate(self.inner):
            if k >= skip:
                yield batch


def set_epoch(loader, epoch):
    sampler = getattr(loader.batch_sampler, "inner", loader.batch_sampler)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(200, 32)
        self.head = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, ids):
        return self.head(self.bag(ids))


def reviews(count=120):
    g = torch.Generator().manual_seed(9)
    label = torch.randint(0, 4, (count,), generator=g)
    ids = torch.randint(0, 200, (count, 10), generator=g)
    ids[:, :3] = label[:, None] * 50 + torch.randint(0, 50, (count, 3), generator=g)
    return TensorDataset(ids, label)


def main(first_epoch=2, done_batches=3, epochs=7):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = reviews()
    batches = ShardedBatches(len(data), 8, rank, dist.get_world_size())
    loader = DataLoader(data, batch_sampler=SkipBatches(batches, done_batches))
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(first_epoch, epochs):
        set_epoch(loader, epoch)
        losses = []
        for ids, label in loader:
            loss = nn.functional.cross_entropy(model(ids), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if rank == 0:
            print(f"epoch {epoch}: {sum(losses) / len(losses):.4f} ({len(losses)} batches)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
