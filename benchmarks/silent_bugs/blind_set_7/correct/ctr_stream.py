"""Click prediction from a stream of log files, AUC over all test impressions."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

FILES, ROWS, FIELDS, VALUES = 8, 160, 6, 40


def read_file(number):
    """One log file: categorical fields and a click."""
    g = torch.Generator().manual_seed(1000 + number)
    weights = torch.randn(FIELDS, VALUES, generator=torch.Generator().manual_seed(0))
    x = torch.randint(VALUES, (ROWS, FIELDS), generator=g)
    logit = weights[torch.arange(FIELDS), x].sum(1) - 1.0
    return x, torch.bernoulli(logit.sigmoid(), generator=g)


class ClickLog(IterableDataset):
    """Files are dealt out over all loader workers of all ranks."""

    def __init__(self, rank, world, seed):
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        files = torch.randperm(FILES, generator=g).tolist()
        for number in files[self.rank * workers + worker::self.world * workers]:
            x, y = read_file(number)
            rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.seed + 100 * self.epoch + number))
            for i in rows.tolist():
                yield x[i], y[i]


class Factorisation(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.linear = nn.Embedding(FIELDS * VALUES, 1)
        self.factor = nn.Embedding(FIELDS * VALUES, dim)
        self.bias = nn.Parameter(torch.zeros(()))
        nn.init.zeros_(self.linear.weight)
        nn.init.normal_(self.factor.weight, std=0.01)
        self.register_buffer("offset", torch.arange(FIELDS) * VALUES)

    def forward(self, x):
        idx = x + self.offset
        v = self.factor(idx)
        pair = 0.5 * (v.sum(1) ** 2 - (v ** 2).sum(1)).sum(1)
        return self.bias + self.linear(idx).sum((1, 2)) + pair


def auc(score, label):
    order = torch.unique(score, return_inverse=True)[1]
    counts = torch.bincount(order).double()
    mid_rank = (counts.cumsum(0) - (counts - 1) / 2)[order]
    pos = label.sum().double()
    neg = len(label) - pos
    return ((mid_rank[label > 0].sum() - pos * (pos + 1) / 2) / (pos * neg)).item()


@torch.no_grad()
def test(model, x, y, rank, world):
    mine = (model(x[rank::world]), y[rank::world])
    parts = [None] * world
    dist.all_gather_object(parts, mine)
    score, label = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    return F.binary_cross_entropy_with_logits(score, label).item(), auc(score, label)


def main(epochs=6):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    data = ClickLog(rank, world, seed=50)
    loader = DataLoader(data, batch_size=40, num_workers=2)
    x_test, y_test = read_file(FILES)
    x_more, y_more = read_file(FILES + 1)
    x_test, y_test = torch.cat([x_test, x_more])[:301], torch.cat([y_test, y_more])[:301]
    torch.manual_seed(0)
    model = DDP(Factorisation())
    opt = torch.optim.Adagrad(model.parameters(), lr=0.15)
    for epoch in range(epochs):
        data.set_epoch(epoch)
        log = torch.zeros(2)
        for x, y in loader:
            loss = F.binary_cross_entropy_with_logits(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            log += torch.tensor([loss.item() * len(y), float(len(y))])
        dist.all_reduce(log)
        bce, area = test(model.module, x_test, y_test, rank, world)
        if rank == 0:
            print(f"epoch {epoch} rows {int(log[1])} train bce {log[0] / log[1]:.4f} test bce {bce:.4f} auc {area:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
