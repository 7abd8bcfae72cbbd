"""Ranks own files of different sizes. Sum-losses, global counts, and empty turns for ranks that have run out."""
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

SIZES = [130 + 37 * r for r in range(world)]
true_w = torch.tensor([[1.0], [-2.0], [0.5]])
g = torch.Generator().manual_seed(rank)          # a different file on each rank
x = torch.randn(SIZES[rank], 3, generator=g)
y = x @ true_w + 0.1 * torch.randn(SIZES[rank], 1, generator=g)

torch.manual_seed(0)                              # the same weights everywhere
model = nn.Linear(3, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
BATCH = 20

mine = torch.tensor((len(x) + BATCH - 1) // BATCH)
turns = mine.clone()
dist.all_reduce(turns, op=dist.ReduceOp.MAX)

for epoch in range(4):
    order = torch.randperm(len(x), generator=g)
    totals = torch.zeros(2)
    for turn in range(int(turns)):
        idx = order[turn * BATCH:(turn + 1) * BATCH]
        loss = (model(x[idx]) - y[idx]).pow(2).sum()      # zero for an empty turn
        opt.zero_grad()
        loss.backward()
        count = torch.tensor(float(len(idx)))
        dist.all_reduce(count)
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= count
        opt.step()
        totals += torch.tensor([loss.item(), len(idx)])
    dist.all_reduce(totals)
    if rank == 0:
        print(f"epoch {epoch} mse {(totals[0] / totals[1]).item():.5f} over {int(totals[1])} rows")

dist.destroy_process_group()
