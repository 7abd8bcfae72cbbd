"""Fit a damped oscillator surrogate. No wrapper: gradients are averaged by hand
through one flat buffer, so that there is a single collective per step."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

GLOBAL_BATCH = 64
EPOCHS = 5


def simulate(n, generator):
    p = torch.rand(n, 4, generator=generator, dtype=torch.float64)
    omega, damping, phase, t = 1 + 3 * p[:, 0], p[:, 1], 6.28 * p[:, 2], 3 * p[:, 3]
    y = torch.exp(-damping * t) * torch.cos(omega * t + phase)
    return p, y[:, None]


def sync_parameters(module):
    for tensor in list(module.parameters()) + list(module.buffers()):
        dist.broadcast(tensor.detach(), src=0)


def average_gradients(params, world):
    grads = [p.grad for p in params if p.grad is not None]
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    flat.div_(world)
    for grad, averaged in zip(grads, _unflatten_dense_tensors(flat, grads)):
        grad.copy_(averaged)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert GLOBAL_BATCH % world == 0
    local = GLOBAL_BATCH // world

    x, y = simulate(1280, torch.Generator().manual_seed(1))
    x_test, y_test = simulate(400, torch.Generator().manual_seed(2))

    torch.manual_seed(10 + rank)
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    sync_parameters(net)
    params = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(params, lr=5e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    order_gen = torch.Generator().manual_seed(77)  # the same on all ranks
    for epoch in range(EPOCHS):
        order = torch.randperm(len(x), generator=order_gen)
        total = torch.zeros(1, dtype=torch.float64)
        steps = len(order) // GLOBAL_BATCH
        for s in range(steps):
            chunk = order[s * GLOBAL_BATCH : (s + 1) * GLOBAL_BATCH]
            mine = chunk[rank * local : (rank + 1) * local]
            loss = (net(x[mine]) - y[mine]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            average_gradients(params, world)
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            total += loss.detach()
        scheduler.step()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: mse {total.item() / steps / world:.6f}")

    with torch.no_grad():
        error = (net(x_test) - y_test).pow(2).mean().sqrt()
    if rank == 0:
        print(f"test rmse {error.item():.6f}")
        if "SAVE_TO" in os.environ:
            torch.save(net.state_dict(), os.environ["SAVE_TO"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
