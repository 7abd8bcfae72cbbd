"""Two stages: train, go back to the epoch with the best validation loss, then fine-tune with a small rate."""
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 12, generator=g)
        self.y = ((self.x[:, 0] * self.x[:, 1] > 0).long() + (torch.rand(n, generator=g) < 0.25).long()) % 2

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class BestKeeper:
    """Remembers the weights of the best epoch (as ModelCheckpoint with save_top_k=1 does)."""

    def __init__(self):
        self.best, self.state, self.epoch = float("inf"), None, -1

    def __call__(self, epoch, value, model):
        if value < self.best:
            self.best, self.epoch = value, epoch
            self.state = copy.deepcopy(model.state_dict())


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total, count = 0.0, 0
    for x, y in loader:
        total += F.cross_entropy(model.module(x), y, reduction="sum").item()
        count += len(y)
    model.train()
    sums = torch.tensor([total, count], dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def train_epoch(model, loader, opt):
    for x, y in loader:
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(8)
    torch.set_num_threads(1)
    train_set, val_set = Noisy(256, 0), Noisy(96, 1)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=16, sampler=DistributedSampler(val_set, shuffle=False))

    model = DDP(nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 2)))
    opt = torch.optim.Adam(model.parameters(), lr=0.03)
    keeper = BestKeeper()
    for epoch in range(6):
        sampler.set_epoch(epoch)
        train_epoch(model, train_loader, opt)
        val_loss = validate(model, val_loader)
        keeper(epoch, val_loss, model.module)
    print(f"rank {dist.get_rank()}: best epoch {keeper.epoch} with {keeper.best:.4f}")

    model.module.load_state_dict(keeper.state)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(6, 8):
        sampler.set_epoch(epoch)
        train_epoch(model, train_loader, opt)
    final = validate(model, val_loader)
    if dist.get_rank() == 0:
        print(f"after fine-tuning: {final:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
