import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def customers(count, seed):
    g = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, 8, generator=g)
    plan = torch.randint(0, 6, (count,), generator=g)
    risk = numbers[:, 0] - numbers[:, 1].abs() + 0.4 * plan - 0.5 + 0.5 * torch.randn(count, generator=g)
    return TensorDataset(numbers, plan, (risk > 0).float())


def make_loader(data, batch, shuffle):
    sampler = DistributedSampler(data, shuffle=shuffle)
    if shuffle:
        return DataLoader(data, batch, sampler=sampler, drop_last=True)
    return DataLoader(data, batch, sampler=range(dist.get_rank(), len(data), dist.get_world_size()))


class Churn(nn.Module):
    def __init__(self, plans=6):
        super().__init__()
        self.plan = nn.Embedding(plans, 4)
        self.net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, numbers, plan):
        return self.net(torch.cat([numbers, self.plan(plan)], 1)).squeeze(1)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    sums = torch.zeros(4, dtype=torch.double)
    for numbers, plan, left in loader:
        logit = model.module(numbers, plan)
        nll = nn.functional.binary_cross_entropy_with_logits(logit, left, reduction="sum")
        hit = (logit > 0).float() * left
        sums += torch.tensor([nll, hit.sum(), left.sum(), len(left)])
    dist.all_reduce(sums)
    model.train()
    return sums[0] / sums[3], sums[1] / sums[2]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    train = make_loader(customers(256, 1), args.batch, shuffle=True)
    valid = make_loader(customers(93, 2), args.batch, shuffle=False)
    model = DistributedDataParallel(Churn())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        train.sampler.set_epoch(epoch)
        for numbers, plan, left in train:
            loss = nn.functional.binary_cross_entropy_with_logits(model(numbers, plan), left)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        nll, recall = evaluate(model, valid)
        if rank == 0:
            print(f"epoch {epoch}: validation loss {nll:.5f} recall {recall:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
