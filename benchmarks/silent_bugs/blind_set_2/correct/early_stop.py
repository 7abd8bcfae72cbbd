import argparse
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Patience:
    def __init__(self, limit, margin=1e-3):
        self.limit, self.margin, self.best, self.bad = limit, margin, float("inf"), 0

    def exhausted(self, value):
        if value < self.best - self.margin:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.limit


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--max-epochs", type=int, default=12)
    p.add_argument("--patience", type=int, default=2)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, 15, generator=g)
    y = (x[:, 0] + 0.7 * torch.randn(300, generator=g) > 0).float().unsqueeze(1)
    train, val_x, val_y = TensorDataset(x[:200], y[:200]), x[200:], y[200:]
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=20, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(15, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    loss_fn = nn.BCEWithLogitsLoss()
    patience = Patience(args.patience)   # only rank 0's copy is consulted
    stop = torch.zeros(1, dtype=torch.int)
    for epoch in range(args.max_epochs):
        sampler.set_epoch(epoch)
        model.train()
        for xb, yb in loader:
            opt.zero_grad()
            loss_fn(model(xb), yb).backward()
            opt.step()
        if rank == 0:
            model.eval()
            with torch.no_grad():
                val = loss_fn(model.module(val_x), val_y).item()
            print(f"epoch {epoch} validation {val:.4f}")
            stop.fill_(int(patience.exhausted(val)))
        dist.broadcast(stop, src=0)
        if stop.item():
            break
    if rank == 0:
        print("stopped after epoch", epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
