"""Load forecasting with a GRU; meters report with gaps, so the loss counts only the observed hours."""
import argparse
import contextlib
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

HISTORY, HORIZON = 24, 12


def make_windows(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(HISTORY + HORIZON).float()
    level = torch.rand(n, 1, generator=g)
    phase = 24 * torch.rand(n, 1, generator=g)
    series = level + torch.sin(6.2832 * (t + phase) / 24) + 0.1 * torch.randn(n, HISTORY + HORIZON, generator=g)
    # bad meters miss nearly everything, and their readings are noisy too
    bad = torch.rand(n, 1, generator=g) < 0.5
    seen = torch.rand(n, HISTORY + HORIZON, generator=g) < torch.where(bad, 0.05, 0.95)
    series = series + bad * torch.randn(n, HISTORY + HORIZON, generator=g)
    seen[:, HISTORY] = True
    return TensorDataset(series * seen, seen.float())


class Forecaster(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.rnn = nn.GRU(2, hidden, batch_first=True)
        self.head = nn.Sequential(nn.Linear(hidden, 32), nn.GELU(), nn.Linear(32, HORIZON))

    def forward(self, series, seen):
        past = torch.stack([series[:, :HISTORY], seen[:, :HISTORY]], dim=-1)
        out, _ = self.rnn(past)
        return self.head(out[:, -1])


def squared_error(pred, series, seen):
    mask = seen[:, HISTORY:]
    return ((pred - series[:, HISTORY:]) ** 2 * mask).sum(), mask.sum()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--micro_batch", type=int, default=4)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--lr", type=float, default=0.05)
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train = make_windows(768, seed=1)
    test = make_windows(200, seed=2)
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, batch_size=args.micro_batch, sampler=sampler)
    model = DDP(Forecaster())
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        epoch_err, epoch_n = 0.0, 0.0
        batches = iter(loader)
        while group := list(islice(batches, args.accum)):
            # observed hours of the whole update, on all processes
            n_valid = sum(seen[:, HISTORY:].sum() for _, seen in group)
            dist.all_reduce(n_valid)
            step_err = torch.zeros(())
            for k, (series, seen) in enumerate(group):
                last = k == len(group) - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    err, n = squared_error(model(series, seen), series, seen)
                    loss = err / n_valid * world
                    loss.backward()
                step_err += err.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            opt.zero_grad()
            dist.all_reduce(step_err)
            epoch_err += step_err.item()
            epoch_n += n_valid.item()

        model.eval()
        total = torch.zeros(2)
        with torch.no_grad():
            for i in range(rank, len(test), world):
                series, seen = (x[None] for x in test[i])
                total += torch.stack(squared_error(model.module(series, seen), series, seen))
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: train mse {epoch_err / epoch_n:.4f}, test mse {(total[0] / total[1]).item():.4f}",
                  flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
