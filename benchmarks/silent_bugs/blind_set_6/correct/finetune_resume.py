# Fine-tuning of a classifier that can be stopped and continued:
#   torchrun ... finetune_resume.py --epochs 3 --stop-after 3
#   torchrun ... finetune_resume.py --resume
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ap = argparse.ArgumentParser()
ap.add_argument("--epochs", type=int, default=6)
ap.add_argument("--stop-after", type=int, default=None)
ap.add_argument("--batch-size", type=int, default=16)
ap.add_argument("--lr", type=float, default=0.05)
ap.add_argument("--out", default="finetune_out")
ap.add_argument("--resume", action="store_true")


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    x = torch.randn(n, 20, generator=g)
    return TensorDataset(x, (torch.tanh(x) @ w + 0.5 * torch.randn(n, 4, generator=g)).argmax(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        return self.head(self.body(x))


def main():
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    path = os.path.join(args.out, "checkpoint.pt")
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)

    torch.manual_seed(0)
    model = DDP(Net())
    opt = torch.optim.SGD([{"params": model.module.body.parameters(), "lr": 0.3 * args.lr},
                           {"params": model.module.head.parameters()}], lr=args.lr, momentum=0.9)
    train_set, val_set = make_data(800, 1), make_data(202, 2)
    sampler = DistributedSampler(train_set, world, rank, shuffle=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs * len(loader))

    start, best = 0, 0.0
    if args.resume:
        state = torch.load(path)
        model.module.load_state_dict(state["model"])
        opt.load_state_dict(state["optimizer"])
        sched.load_state_dict(state["scheduler"])
        start, best = state["epoch"] + 1, state["best"]

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(10_000 * (epoch + 1) + rank)  # dropout, the same after a restart
        model.train()
        run = torch.zeros(2)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            run += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(run)

        model.eval()
        with torch.no_grad():
            x, y = (t[rank::world] for t in val_set.tensors)
            hits = torch.tensor([(model.module(x).argmax(1) == y).sum(), len(y)])
        dist.all_reduce(hits)
        acc = (hits[0] / hits[1]).item()
        best = max(best, acc)
        if rank == 0:
            print(f"epoch {epoch} lr {sched.get_last_lr()[1]:.4f} loss {run[0] / run[1]:.4f} "
                  f"val acc {acc:.4f} best {best:.4f}", flush=True)
            torch.save({"model": model.module.state_dict(), "optimizer": opt.state_dict(),
                        "scheduler": sched.state_dict(), "epoch": epoch, "best": best}, path)
        dist.barrier()
        if args.stop_after is not None and epoch + 1 == args.stop_after:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
