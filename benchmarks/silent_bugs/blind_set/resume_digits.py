"""Train a digit classifier; picks up from the last checkpoint if there is one.

    torchrun --standalone --nproc-per-node 2 resume_digits.py --out runs/digits
    torchrun --standalone --nproc-per-node 2 resume_digits.py --out runs/digits --epochs 6
"""
import argparse
import os
import shutil

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class FakeDigits(Dataset):
    def __init__(self, n=800, seed=0):
        shapes = torch.rand(10, 12, 12, generator=torch.Generator().manual_seed(1234)) > 0.5
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 10, (n,), generator=g)
        self.images = shapes[self.labels].float() + torch.randn(n, 12, 12, generator=g) * 1.2

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(144, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def save(path, model, optimizer, epoch):
    state = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": epoch,
    }
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def train(args):
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    torch.manual_seed(args.seed)

    dataset = FakeDigits()
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

    model = DDP(MLP())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    start_epoch = torch.zeros(1, dtype=torch.long)

    path = os.path.join(args.out, "last.pt")
    if os.path.exists(path):
        state = torch.load(path, map_location="cpu")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start_epoch[0] = state["epoch"] + 1
        if rank == 0:
            print(f"resumed from {path} (epoch {state['epoch']})")
    dist.broadcast(start_epoch, src=0)

    for epoch in range(start_epoch.item(), args.epochs):
        sampler.set_epoch(epoch)
        stats = torch.zeros(3)
        for images, labels in loader:
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                hits = (logits.argmax(1) == labels).sum()
            stats += torch.tensor([loss.item() * len(labels), hits.item(), len(labels)])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch}: loss {stats[0] / stats[2]:.4f} acc {stats[1] / stats[2]:.4f}")
            save(path, model, optimizer, epoch)
        dist.barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="/tmp/digits_run")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="remove what an earlier run left")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        if args.fresh:
            shutil.rmtree(args.out, ignore_errors=True)
        os.makedirs(args.out, exist_ok=True)
    dist.barrier()
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
