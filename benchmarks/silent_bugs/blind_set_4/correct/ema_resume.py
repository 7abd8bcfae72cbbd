import copy
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Run:
    def __init__(self, total_steps):
        g = torch.Generator().manual_seed(2)
        x = torch.randn(96, 7, generator=g)
        self.data = TensorDataset(x, x.pow(2).sum(1, keepdim=True) / 7)
        self.sampler = DistributedSampler(self.data, seed=3)
        self.loader = DataLoader(self.data, 12, sampler=self.sampler)
        self.model = DDP(nn.Sequential(nn.Linear(7, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)))
        # a copy of the weights that DDP has just made equal on all ranks
        self.ema = copy.deepcopy(self.model.module).requires_grad_(False)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, total_steps)
        self.epoch = 0

    def state(self):
        parts = ("model", "ema", "opt", "sched")
        return {"epoch": self.epoch, **{k: getattr(self, k).state_dict() for k in parts}}

    def restore(self, state):
        self.epoch = state.pop("epoch")
        for k, v in state.items():
            getattr(self, k).load_state_dict(v)

    @torch.no_grad()
    def update_ema(self, decay=0.9):
        for e, p in zip(self.ema.parameters(), self.model.module.parameters()):
            e.lerp_(p, 1 - decay)
        for e, b in zip(self.ema.buffers(), self.model.module.buffers()):
            e.copy_(b)

    def train_until(self, epochs):
        while self.epoch < epochs:
            self.sampler.set_epoch(self.epoch)
            for x, y in self.loader:
                loss = nn.functional.mse_loss(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.sched.step()
                self.update_ema()
            self.epoch += 1
            if dist.get_rank() == 0:
                print(f"epoch {self.epoch} loss {loss.item():.4f} lr {self.sched.get_last_lr()[0]:.5f}")


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "state.pt")
    run = Run(total_steps=16)
    run.train_until(2)
    if rank == 0:  # BatchNorm's statistics are those of rank 0, as DDP sends them around
        torch.save(run.state(), path)
    dist.barrier()
    again = Run(total_steps=16)
    again.restore(torch.load(path, weights_only=True))
    again.train_until(4)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
