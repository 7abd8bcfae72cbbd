import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def build():
    net = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 12))
    model = DDP(net)
    return model, torch.optim.AdamW(model.parameters(), lr=5e-3)


def run(model, optimizer, data, first, last):
    for step in range(first, last):
        clean = data[step]
        noisy = clean + 0.5 * torch.randn_like(clean)
        loss = (model(noisy) - clean).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1} loss {loss.item():.5f}")


def save(path, step, model, optimizer):
    rng = [None] * dist.get_world_size()
    dist.all_gather_object(rng, torch.get_rng_state())
    if dist.get_rank() == 0:
        torch.save(
            {"step": step, "model": model.module.state_dict(), "optim": optimizer.state_dict(), "rng": rng},
            path,
        )
    dist.barrier()


def load(path, model, optimizer):
    blob = torch.load(path, weights_only=True)
    model.module.load_state_dict(blob["model"])
    optimizer.load_state_dict(blob["optim"])
    torch.set_rng_state(blob["rng"][dist.get_rank()])
    return blob["step"]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "last.pt")
    g = torch.Generator().manual_seed(77 + rank)
    base = torch.randn(30, 16, 3, generator=g)
    data = torch.cat([base, base.sin(), base.cos(), base**2 - 1], -1)

    torch.manual_seed(300 + rank)
    model, optimizer = build()
    run(model, optimizer, data, 0, 10)
    save(path, 10, model, optimizer)

    model, optimizer = build()
    start = load(path, model, optimizer)
    run(model, optimizer, data, start, 30)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
