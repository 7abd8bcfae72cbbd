from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Ring(Dataset):
    def __len__(self):
        return 90

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        angle = torch.rand(1, generator=g) * 6.28
        radius = 1.0 + (i % 3)
        return torch.cat([angle.cos(), angle.sin()]) * radius + 0.1 * torch.randn(2, generator=g), i % 3


class Callback:
    def on_step(self, trainer, loss): ...
    def on_epoch(self, trainer): ...


@dataclass
class MeanLoss(Callback):
    """A running mean on each rank; reduced once per epoch for the print."""

    values: list = field(default_factory=list)

    def on_step(self, trainer, loss):
        self.values.append(loss)

    def on_epoch(self, trainer):
        mean = torch.stack(self.values).mean()
        dist.reduce(mean, dst=0)
        if trainer.rank == 0:
            print(f"epoch {trainer.epoch} mean loss {mean.item() / trainer.world:.4f}")
        self.values.clear()


class Trainer:
    def __init__(self, module, dataset, callbacks=(), batch_size=9, lr=2e-2):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.module = module
        self.model = DistributedDataParallel(module, find_unused_parameters=True)
        self.optimizer = torch.optim.RMSprop(module.parameters(), lr=lr)
        self.sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
        self.loader = DataLoader(dataset, batch_size, sampler=self.sampler)
        self.callbacks = callbacks
        self.epoch = 0

    def fit(self, epochs):
        for self.epoch in range(epochs):
            self.sampler.set_epoch(self.epoch)
            for batch in self.loader:
                loss = self.step(batch)
                for c in self.callbacks:
                    c.on_step(self, loss)
            for c in self.callbacks:
                c.on_epoch(self)

    def step(self, batch):
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class Branches(nn.Module):
    """Odd epochs use the second branch too; the choice is the same on all ranks."""

    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(2, 32), nn.ReLU())
        self.b = nn.Sequential(nn.Linear(2, 32), nn.Sigmoid())
        self.out = nn.Linear(32, 3)
        self.use_b = False

    def forward(self, x):
        h = self.a(x)
        if self.use_b:
            h = h + self.b(x)
        return self.out(h)


class Toggle(Callback):
    def on_epoch(self, trainer):
        trainer.module.use_b = not trainer.module.use_b


def main():
    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    Trainer(Branches(), Ring(), [MeanLoss(), Toggle()]).fit(4)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
