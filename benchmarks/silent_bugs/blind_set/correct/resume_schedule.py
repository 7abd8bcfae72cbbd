"""Training that can be stopped and continued in the middle of an epoch.

    torchrun --standalone --nproc-per-node 2 resume_schedule.py --ckpt /tmp/s.pt --stop-at 17
    torchrun --standalone --nproc-per-node 2 resume_schedule.py --ckpt /tmp/s.pt
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class ResumableSampler(Sampler):
    """Shuffles with (seed, epoch), and can skip what was already consumed."""

    def __init__(self, n, rank, world, seed):
        self.n, self.rank, self.world, self.seed = n, rank, world, seed
        self.epoch, self.skip = 0, 0

    def begin(self, epoch, skip=0):
        self.epoch, self.skip = epoch, skip

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed * 7919 + self.epoch)
        order = torch.randperm(self.n, generator=g)[: self.n // self.world * self.world]
        return iter(order[self.rank :: self.world][self.skip :].tolist())

    def __len__(self):
        return self.n // self.world - self.skip


def teacher_data(n=640):
    g = torch.Generator().manual_seed(40)
    x = torch.randn(n, 16, generator=g)
    hidden = torch.relu(x @ torch.randn(16, 8, generator=g))
    return TensorDataset(x, hidden @ torch.randn(8, 1, generator=g) / 3)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--ckpt", default="")
    ap.add_argument("--stop-at", type=int, default=-1)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--global-batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=1e-2)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_batch = args.global_batch // world
    dataset = teacher_data()
    steps_per_epoch = len(dataset) // args.global_batch
    total_steps = args.epochs * steps_per_epoch

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total_steps)
    step = 0
    if args.ckpt and os.path.exists(args.ckpt):
        state = torch.load(args.ckpt, map_location="cpu")
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        step = state["step"]
        if rank == 0:
            print(f"continuing at step {step}")
    dist.barrier()  # nobody overwrites the file before all have read it
    model = DDP(net)

    sampler = ResumableSampler(len(dataset), rank, world, seed=3)
    loader = DataLoader(dataset, batch_size=local_batch, sampler=sampler, drop_last=True)
    last = args.stop_at if args.stop_at > 0 else total_steps
    while step < last:
        epoch, done = divmod(step, steps_per_epoch)
        sampler.begin(epoch, skip=done * local_batch)
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % 10 == 0:
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                if rank == 0:
                    lr = scheduler.get_last_lr()[0]
                    print(f"step {step}: loss {mean.item() / world:.6f} lr {lr:.6f}")
            if step >= last:
                break

    if args.ckpt and rank == 0:
        state = dict(
            net=net.state_dict(),
            optimizer=optimizer.state_dict(),
            scheduler=scheduler.state_dict(),
            step=step,
        )
        torch.save(state, args.ckpt + ".part")
        os.replace(args.ckpt + ".part", args.ckpt)
    dist.barrier()
    if rank == 0:
        x, y = dataset.tensors
        with torch.no_grad():
            print(f"after step {step}: full mse {F.mse_loss(net(x), y).item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
