"""Start with `python spawn_warmup.py`; it spawns its own two workers. Own warm-up and cosine schedule."""
import math
import os
import tempfile
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def lr_at(step, total, peak=0.2, warm=5):
    if step < warm:
        return peak * (step + 1) / warm
    return 0.5 * peak * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))


def worker(rank, world, rendezvous, epochs):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(320, 7, generator=g)
    data = TensorDataset(x, (x.norm(dim=1) > 2.5).long())
    sampler = DistributedSampler(data, num_replicas=world, rank=rank)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 2)))
    opt = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    total, step = epochs * len(loader), 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        loss_sum = torch.zeros(())
        for xb, yb in loader:
            for group in opt.param_groups:
                group["lr"] = lr_at(step, total)
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(xb), yb)
            loss.backward()
            opt.step()
            loss_sum += loss.detach()
            step += 1
        dist.all_reduce(loss_sum)
        if rank == 0:
            print(f"epoch {epoch} loss {loss_sum.item() / world / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(2, os.path.join(folder, "meet"), 4), nprocs=2)
