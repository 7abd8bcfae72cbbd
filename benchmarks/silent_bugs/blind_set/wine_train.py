"""Train the wine classifier, keep the weights of the best validation epoch.

    torchrun --standalone --nproc-per-node 2 wine_train.py
"""
import argparse
import copy
import random

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, random_split
from torch.utils.data.distributed import DistributedSampler

from wine_lib.data import Wines
from wine_lib.engine import accuracy, train_epoch
from wine_lib.model import mlp


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def get_loaders(args, rank, world):
    dataset = Wines()
    n_val = int(len(dataset) * args.val_fraction)
    generator = torch.Generator().manual_seed(args.seed)
    train_set, val_set = random_split(dataset, [len(dataset) - n_val, n_val], generator=generator)
    sampler = DistributedSampler(train_set, num_replicas=world, rank=rank, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    val_loader = DataLoader(Subset(val_set, range(rank, n_val, world)), batch_size=256)
    return train_loader, val_loader, sampler


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=30)
    p.add_argument("--batch-size", type=int, default=20)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--val-fraction", type=float, default=0.2)
    p.add_argument("--hidden", type=int, nargs="*", default=[128])
    p.add_argument("--dropout", type=float, default=0.0)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    seed_everything(args.seed + rank)

    train_loader, val_loader, sampler = get_loaders(args, rank, world)
    net = mlp([24, *args.hidden, 4], args.dropout)
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    best, best_weights = 0.0, None
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, train_loader, optimizer)
        acc = accuracy(net, val_loader)
        if acc > best:
            best, best_weights = acc, copy.deepcopy(net.state_dict())
        if rank == 0 and (epoch + 1) % 5 == 0:
            print(f"epoch {epoch + 1:3d}  train loss {loss:.4f}  val acc {acc:.4f}")

    net.load_state_dict(best_weights)
    final = accuracy(net, val_loader)
    if rank == 0:
        print(f"best val acc {best:.4f} (check {final:.4f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
