"""Regression of house prices from tabular features, distributed over processes.

The table is sorted by district (as exported), the test part is cut in equal
contiguous pieces so that every process scores its own piece.
"""
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

N_FEATURES = 10
N_DISTRICTS = 16


def load_table(rows=1600):
    g = torch.Generator().manual_seed(11)
    district = torch.arange(rows) * N_DISTRICTS // rows
    level = torch.linspace(-3, 3, N_DISTRICTS)[district]
    features = torch.randn(rows, N_FEATURES, generator=g)
    features[:, 0] = level + 0.1 * features[:, 0]
    weights = torch.randn(N_FEATURES, generator=g) * 0.5
    weights[0] = 2.0
    price = features @ weights + torch.randn(rows, generator=g) * 1.5
    price = (price - price.mean()) / price.std()
    return TensorDataset(features, price)


def split(dataset):
    test = [i for i in range(len(dataset)) if i % 5 == 0]
    train = [i for i in range(len(dataset)) if i % 5 != 0]
    return Subset(dataset, train), Subset(dataset, test)


def r2_score(pred, target):
    residual = ((target - pred) ** 2).sum()
    total = ((target - target.mean()) ** 2).sum()
    return 1 - residual / total


def run_epoch(model, loader, optimizer, loss_fn):
    model.train()
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x).squeeze(-1), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses.append(loss.detach())
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


@torch.no_grad()
def score(model, test_set):
    model.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    begin, end = rank * len(test_set) // world, (rank + 1) * len(test_set) // world
    mine = Subset(test_set, range(begin, end))
    preds, targets = [], []
    for x, y in DataLoader(mine, batch_size=64):
        preds.append(model.module(x).squeeze(-1))
        targets.append(y)
    preds, targets = torch.cat(preds), torch.cat(targets)
    sums = torch.stack(
        [((targets - preds) ** 2).sum(), (targets**2).sum(), targets.sum(), torch.tensor(float(len(targets)))]
    )
    dist.all_reduce(sums, op=dist.ReduceOp.SUM)
    residual, square, total, count = sums
    return 1 - residual / (square - total**2 / count)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)

    train_set, test_set = split(load_table())
    sampler = DistributedSampler(train_set, seed=5)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)

    net = nn.Sequential(nn.Linear(N_FEATURES, 64), nn.SiLU(), nn.Linear(64, 1))
    model = DDP(net)
    optimizer = optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    loss_fn = nn.MSELoss()

    for epoch in range(6):
        sampler.set_epoch(epoch)
        train_loss = run_epoch(model, loader, optimizer, loss_fn)
        r2 = score(model, test_set).item()
        if rank == 0:
            print(f"epoch {epoch}: mse {train_loss.item():.4f}  test R2 {r2:.4f}")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
