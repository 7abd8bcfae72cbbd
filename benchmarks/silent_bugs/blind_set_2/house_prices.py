"""Regression on a synthetic table with gradient accumulation under DDP."""
from contextlib import nullcontext
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

ACCUM = 4
EPOCHS = 3


def build_table(n=320):
    g = torch.Generator().manual_seed(42)
    x = torch.randn(n, 8, generator=g)
    w = torch.randn(8, 1, generator=g)
    y = x @ w + 0.5 * torch.sin(3 * x[:, :1]) + 0.05 * torch.randn(n, 1, generator=g)
    return TensorDataset(x, y)


dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
torch.manual_seed(1)

data = build_table()
sampler = DistributedSampler(data, shuffle=True, seed=9)
loader = DataLoader(data, batch_size=32 // world, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss_fn = nn.MSELoss()

n_batches = len(loader)
leftover = n_batches % ACCUM
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    running = torch.zeros(1)
    optimizer.zero_grad()
    for i, (x, y) in enumerate(loader):
        last = i + 1 == n_batches
        window = leftover if leftover and i >= n_batches - leftover else ACCUM
        sync = (i + 1) % ACCUM == 0 or last
        with nullcontext() if sync else model.no_sync():
            loss = loss_fn(model(x), y)
            (loss / window).backward()
        running += loss.detach()
        if (i + 1) % ACCUM == 0 or last:
            optimizer.step()
            optimizer.zero_grad()
    dist.all_reduce(running)
    if rank == 0:
        print(f"[{epoch}] mse {running.item() / (n_batches * world):.5f}")

if rank == 0:
    torch.save(model.module.state_dict(), "/tmp/blind2/house_prices.pt")
dist.barrier()
dist.destroy_process_group()
