import os
import shutil
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Skip(DistributedSampler):
    """Begins an epoch after the given number of samples of this rank."""

    start = 0

    def __iter__(self):
        order = list(super().__iter__())[self.start :]
        self.start = 0
        return iter(order)


def data():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(90, 12, generator=g)
    return TensorDataset(x, (x[:, 0] > x[:, 1]).long() + (x[:, 2] > 0).long())


class Run:
    def __init__(self, path, batch=6):
        self.path, self.batch = path, batch
        torch.manual_seed(100 + dist.get_rank())
        dataset = data()
        self.sampler = Skip(dataset, seed=3)
        self.loader = DataLoader(dataset, batch, sampler=self.sampler, generator=torch.Generator())
        self.model = DistributedDataParallel(
            nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 3))
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        self.epoch = self.place = 0

    def save(self):
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, torch.get_rng_state())
        if dist.get_rank() == 0:
            torch.save({
                "model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict(),
                "epoch": self.epoch, "place": self.place, "random": states,
            }, self.path)
        dist.barrier()

    def load(self):
        state = torch.load(self.path)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.place = state["epoch"], state["place"]
        torch.set_rng_state(state["random"][dist.get_rank()])

    def fit(self, epochs, stop=None):
        while self.epoch < epochs:
            self.sampler.set_epoch(self.epoch)
            self.sampler.start = self.place * self.batch
            for x, y in self.loader:
                loss = nn.functional.cross_entropy(self.model(x + 0.1 * torch.randn_like(x)), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.place += 1
                if (self.epoch, self.place) == stop:
                    return self.save()
            self.epoch, self.place = self.epoch + 1, 0
            if dist.get_rank() == 0:
                print(f"epoch {self.epoch}: {loss.item():.6f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    where = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(where, src=0)
    file = os.path.join(where[0], "state.pt")
    Run(file).fit(4, stop=(1, 5))
    again = Run(file)
    again.load()
    again.fit(4)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(where[0])
    dist.destroy_process_group()
