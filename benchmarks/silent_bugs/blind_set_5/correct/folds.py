import argparse

import torch
import torch.distributed as dist
from torch import nn


def load(rows):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 10, generator=g)
    y = (x[:, 0] * x[:, 1] + 0.5 * x[:, 2] > 0).long()
    return x, y


def run_fold(x, y, held, args, fold):
    torch.manual_seed(args.seed + fold)
    keep = torch.ones(len(x), dtype=torch.bool)
    keep[held] = False
    train_x, train_y = x[keep], y[keep]
    net = nn.Sequential(nn.Linear(10, args.hidden), nn.BatchNorm1d(args.hidden), nn.ReLU(), nn.Linear(args.hidden, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(args.epochs):
        for part in torch.randperm(len(train_x)).split(20):
            loss = nn.functional.cross_entropy(net(train_x[part]), train_y[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    net.eval()
    with torch.no_grad():
        return (net(x[held]).argmax(1) == y[held]).float().mean().item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--folds", type=int, default=5)
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--hidden", type=int, default=32)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--seed", type=int, default=3)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load(150)
    parts = torch.randperm(len(x), generator=torch.Generator().manual_seed(args.seed)).chunk(args.folds)
    scores = torch.zeros(args.folds)
    for fold in range(rank, args.folds, world):
        scores[fold] = run_fold(x, y, parts[fold], args, fold)
    dist.all_reduce(scores)
    if rank == 0:
        print("accuracy of the folds", [round(s, 3) for s in scores.tolist()], "mean", round(scores.mean().item(), 4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
