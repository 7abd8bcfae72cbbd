import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class ShardedFragments:
    """Which fragments of a table belong to this reader."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def pick(self, fragments, seed):
        g = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(fragments), generator=g).tolist()
        return [fragments[i] for i in order[self.rank :: self.world]]


class Interactions(IterableDataset):
    def __init__(self, fragments, sampler, batch):
        self.fragments, self.sampler, self.batch = fragments, sampler, batch
        self.epoch = 0

    def __iter__(self):
        info = get_worker_info()
        mine = self.sampler.pick(self.fragments, self.epoch)[info.id :: info.num_workers]
        for users, items, stars in mine:
            keep = torch.rand(len(users)) < 0.9
            rows = torch.nonzero(keep).flatten()
            for part in rows.split(self.batch):
                yield users[part], items[part], stars[part]


class TwoTables(nn.Module):
    def __init__(self, users=60, items=40, width=12):
        super().__init__()
        self.user, self.item = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        self.mean = nn.Parameter(torch.tensor(3.0))

    def forward(self, u, i):
        taste = (self.user(u) * self.item(i)).sum(-1)
        return self.mean + taste + self.user_bias(u).squeeze(1) + self.item_bias(i).squeeze(1)


def table(fragments=8, rows=48):
    g = torch.Generator().manual_seed(3)
    taste_u, taste_i = torch.randn(60, 4, generator=g), torch.randn(40, 4, generator=g)
    out = []
    for _ in range(fragments):
        u = torch.randint(0, 60, (rows,), generator=g)
        i = torch.randint(0, 40, (rows,), generator=g)
        out.append((u, i, 3 + 0.5 * (taste_u[u] * taste_i[i]).sum(-1)))
    return out


def train():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Interactions(table(), ShardedFragments(rank, world), batch=48)
    loader = DataLoader(data, batch_size=None, num_workers=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoTables())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for epoch in range(4):
        data.epoch = epoch
        seen, total = 0, 0.0
        for u, i, stars in loader:
            loss = nn.functional.mse_loss(model(u, i), stars)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen, total = seen + len(u), total + loss.item() * len(u)
        if rank == 0:
            print(f"epoch {epoch}: {seen} rows read, mse {total / seen:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
