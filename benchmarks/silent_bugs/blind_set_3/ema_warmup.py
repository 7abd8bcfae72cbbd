"""Training with an EMA copy whose decay warms up; checkpoint and restart in the middle."""
import copy
import math
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ModelEMA:
    def __init__(self, model, decay=0.98, tau=8):
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay, self.tau, self.updates = decay, tau, 0

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        d = self.decay * (1 - math.exp(-self.updates / self.tau))
        for ema, p in zip(self.module.parameters(), model.parameters()):
            ema.lerp_(p, 1 - d)

    def state_dict(self):
        return {"module": self.module.state_dict(), "updates": self.updates}

    def load_state_dict(self, state):
        self.module.load_state_dict(state["module"])
        self.updates = state["updates"]


def moons(n=320):
    g = torch.Generator().manual_seed(9)
    t = torch.rand(n, generator=g) * math.pi
    y = torch.randint(0, 2, (n,), generator=g)
    x = torch.stack([torch.cos(t) * (1 - 2 * y) + y, torch.sin(t) * (1 - 2 * y) + 0.5 * y], 1)
    return TensorDataset(x + 0.1 * torch.randn(n, 2, generator=g), y)


def new_state():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    ema = ModelEMA(net)
    model = DistributedDataParallel(net)
    return model, ema, torch.optim.SGD(model.parameters(), lr=0.2)


def run_epoch(model, ema, opt, loader, epoch):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        ema.update(model.module)
    return loss.item()


def evaluate(ema, data):
    with torch.no_grad():
        return (ema.module(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean().item()


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    path = [os.path.join(tempfile.mkdtemp(), "ckpt.pt")] if rank == 0 else [None]
    dist.broadcast_object_list(path)
    data = moons()
    loader = DataLoader(data, 16, sampler=DistributedSampler(data, seed=1), drop_last=True)

    model, ema, opt = new_state()
    for epoch in range(2):
        run_epoch(model, ema, opt, loader, epoch)
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict(), "epoch": 2}, path[0])
    dist.barrier()

    model, ema, opt = new_state()  # the restarted job
    ckpt = torch.load(path[0], weights_only=False)
    model.module.load_state_dict(ckpt["model"])
    ema.load_state_dict(ckpt["ema"])
    opt.load_state_dict(ckpt["opt"])
    for epoch in range(ckpt["epoch"], 4):
        loss = run_epoch(model, ema, opt, loader, epoch)
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.4f} ema accuracy {evaluate(ema, data):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
