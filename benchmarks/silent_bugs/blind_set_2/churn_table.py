import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

SEED = 2024


def customers(n=400):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 12, generator=g)
    score = x[:, 0] * x[:, 1] + x[:, 2] - 0.5 * x[:, 3]
    y = (score + 0.8 * torch.randn(n, generator=g) > 0).float()
    return TensorDataset(x, y)


def setup():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # dropout must not be the same everywhere; DDP takes care of the initial weights
    torch.manual_seed(SEED + rank)
    return rank, dist.get_world_size()


def loaders(rank, world):
    full = customers()
    train, valid = random_split(full, [301, 99], generator=torch.Generator().manual_seed(SEED))
    sampler = DistributedSampler(train, shuffle=True, seed=SEED, drop_last=True)
    mine = torch.utils.data.Subset(valid, range(rank, len(valid), world))
    return sampler, DataLoader(train, batch_size=25, sampler=sampler), DataLoader(mine, batch_size=50)


def evaluate(model, loader):
    model.eval()
    c = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            c[0] += ((model(x).squeeze(1) > 0).float() == y).sum()
            c[1] += len(y)
    dist.all_reduce(c)
    model.train()
    return (c[0] / c[1]).item()


def main():
    rank, world = setup()
    sampler, train, valid = loaders(rank, world)
    model = DDP(nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for x, y in train:
            opt.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            loss.backward()
            opt.step()
        acc = evaluate(model.module, valid)
        if rank == 0:
            print(f"epoch {epoch}: held-out accuracy {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
