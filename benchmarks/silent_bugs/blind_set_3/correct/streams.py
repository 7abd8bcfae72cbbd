"""Online learning: every rank reads its own endless stream, the model is one."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def stream(rank, size=24):
    """Sensor readings of one site; each site has its own generator and slowly drifting phase."""
    g = torch.Generator().manual_seed(900 + rank)
    t = 0
    while True:
        phase = 0.05 * t + rank
        x = torch.rand(size, 1, generator=g) * 6.28
        extra = torch.randn(size, 3, generator=g)
        y = torch.sin(x + phase) + 0.1 * torch.randn(size, 1, generator=g)
        yield torch.cat([torch.sin(x), torch.cos(x), torch.full_like(x, phase).sin(), torch.full_like(x, phase).cos(), extra], 1), y
        t += 1


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DDP(nn.Sequential(nn.Linear(7, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.7)
    mse = nn.MSELoss()
    source = stream(RANK)
    window = []
    for step in range(30):
        x, y = next(source)
        loss = mse(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        window.append(loss.detach())
        if len(window) == 10:
            mean = torch.stack(window).mean()
            dist.all_reduce(mean)
            window.clear()
            if RANK == 0:
                print(f"step {step + 1}: mse {mean.item() / WORLD:.4f} lr {scheduler.get_last_lr()[0]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
