"""Local steps on every rank, then an outer step on the mean change (DiLoCo)."""
import torch
import torch.distributed as dist
import torch.nn as nn


def main(rounds=4, local_steps=5):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1))
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    anchor = [p.detach().clone().requires_grad_() for p in model.parameters()]
    outer = torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)
    inner = torch.optim.AdamW(model.parameters(), lr=5e-3)  # its moments stay local by design
    g = torch.Generator().manual_seed(90 + rank)
    for r in range(rounds):
        for _ in range(local_steps):
            x = torch.randn(32, 10, generator=g)
            loss = nn.functional.mse_loss(model(x), x[:, :1] * x[:, 1:2])
            inner.zero_grad()
            loss.backward()
            inner.step()
        for a, p in zip(anchor, model.parameters()):
            a.grad = a.detach() - p.detach()
            dist.all_reduce(a.grad)
            a.grad /= world
        outer.step()
        with torch.no_grad():
            for a, p in zip(anchor, model.parameters()):
                p.copy_(a)
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"round {r} local loss {total.item() / world:.4f}")
    dist.destroy_process_group()


main()
