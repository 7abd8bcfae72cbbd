import torch
import torch.distributed as dist
import torch.nn as nn

ROUNDS, LOCAL, LR = 6, 8, 0.05

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
g = torch.Generator().manual_seed(1000 + rank)
turn = torch.Generator().manual_seed(5)
direction = 0.3 * torch.randn(12, 2, generator=turn)


@torch.no_grad()
def average():
    tensors = []
    for p in net.parameters():
        tensors += [p.data, optimizer.state[p]["momentum_buffer"]]
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat)
    flat /= world
    for t, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        t.copy_(part.view_as(t))


for r in range(ROUNDS):
    total = 0.0
    for _ in range(LOCAL):
        x = torch.randn(32, 12, generator=g)
        y = (x @ direction).sin()
        loss = nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() / LOCAL
    average()
    mean = torch.tensor(total)
    dist.all_reduce(mean)
    if rank == 0:
        print(f"round {r}: {mean.item() / world:.4f}")

dist.destroy_process_group()
