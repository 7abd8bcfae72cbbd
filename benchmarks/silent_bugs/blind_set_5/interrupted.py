import os
import shutil
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Batches:
    """Shuffled batches of one rank, which can go on in the middle of an epoch."""

    def __init__(self, size, batch, rank, world, seed):
        self.size, self.batch, self.rank, self.world = size, batch, rank, world
        self.g = torch.Generator().manual_seed(seed)
        self.done = 0

    def __iter__(self):
        self.begun = self.g.get_state()
        order = torch.randperm(self.size, generator=self.g)[self.rank :: self.world]
        for rows in order.split(self.batch)[self.done :]:
            self.done += 1
            yield rows
        self.done = 0

    def state_dict(self):
        return {"g": self.begun, "done": self.done}

    def load_state_dict(self, state):
        self.g.set_state(state["g"])
        self.done = state["done"]


class GeneModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 12)
        self.conv = nn.Sequential(nn.Conv1d(12, 24, 5, padding=2), nn.GELU(), nn.AdaptiveMaxPool1d(1), nn.Flatten())
        self.head = nn.Linear(24, 3)

    def forward(self, bases):
        return self.head(self.conv(self.embed(bases).transpose(1, 2)))


def genome(count=96):
    g = torch.Generator().manual_seed(6)
    bases = torch.randint(0, 4, (count, 30), generator=g)
    kind = torch.randint(0, 3, (count,), generator=g)
    for n in range(count):
        bases[n, 10:14] = torch.tensor([kind[n], 3, 3, kind[n]])
    return bases, kind


def train(path, updates, resume, stop=None):
    rank = dist.get_rank()
    torch.manual_seed(0)
    bases, kind = genome()
    model = DistributedDataParallel(GeneModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches, step = Batches(len(bases), 8, rank, dist.get_world_size(), seed=4), 0
    if resume:
        state = torch.load(path)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        batches.load_state_dict(state["batches"])
        step = state["step"]
    while step < updates:
        for rows in batches:
            loss = nn.functional.cross_entropy(model(bases[rows]), kind[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == stop:
                if rank == 0:
                    torch.save(
                        {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                         "batches": batches.state_dict(), "step": step}, path)
                dist.barrier()
                return
            if step == updates:
                break
        if rank == 0:
            print(f"update {step}: {loss.item():.5f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    checkpoint = os.path.join(folder[0], "last.pt")
    train(checkpoint, updates=30, resume=False, stop=9)
    train(checkpoint, updates=30, resume=True)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()
