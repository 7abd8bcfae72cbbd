"""Small CNN on 10-class thumbnails, trained for a fixed number of steps.

    torchrun --standalone --nproc-per-node 2 cifar_steps.py
"""
import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Config:
    max_steps: int = 60
    batch_size: int = 32
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    log_every: int = 10
    seed: int = 0


def make_thumbnails(n, seed):
    g = torch.Generator().manual_seed(seed)
    prototypes = torch.randn(10, 3, 16, 16, generator=torch.Generator().manual_seed(99))
    y = torch.randint(0, 10, (n,), generator=g)
    x = prototypes[y] * 0.5 + torch.randn(n, 3, 16, 16, generator=g)
    return TensorDataset(x, y)


class SmallCNN(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width * 2, 3, padding=1)
        self.norm = nn.GroupNorm(4, width * 2)
        self.head = nn.Linear(width * 2 * 16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.norm(self.conv2(x))), 2)
        return self.head(x.flatten(1))


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        torch.manual_seed(cfg.seed)
        self.model = DDP(SmallCNN())
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=cfg.lr,
            momentum=cfg.momentum,
            weight_decay=cfg.weight_decay,
        )
        self.train_set = make_thumbnails(640, seed=1)
        self.sampler = DistributedSampler(self.train_set, shuffle=True, seed=cfg.seed)
        self.loader = DataLoader(
            self.train_set, batch_size=cfg.batch_size, sampler=self.sampler, drop_last=True
        )
        self.step = 0
        self.epoch = 0

    def log(self, msg):
        if self.rank == 0:
            print(f"[{time.strftime('%H:%M:%S')}] {msg}", flush=True)

    def train_step(self, x, y):
        self.model.train()
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def fit(self):
        running = torch.zeros(())
        while self.step < self.cfg.max_steps:
            self.sampler.set_epoch(self.epoch)
            for x, y in self.loader:
                running += self.train_step(x, y)
                self.step += 1
                if self.step % self.cfg.log_every == 0:
                    mean = running / self.cfg.log_every
                    dist.all_reduce(mean)
                    mean /= self.world_size
                    self.log(f"step {self.step:4d}  loss {mean.item():.4f}")
                    running.zero_()
                if self.step >= self.cfg.max_steps:
                    break
            self.epoch += 1

    @torch.no_grad()
    def accuracy(self):
        self.model.eval()
        test = make_thumbnails(400, seed=2)
        x, y = test.tensors
        x, y = x[self.rank :: self.world_size], y[self.rank :: self.world_size]
        hits = (self.model.module(x).argmax(1) == y).sum()
        counts = torch.stack([hits, torch.tensor(len(y))])
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    trainer = Trainer(Config())
    trainer.fit()
    acc = trainer.accuracy()
    trainer.log(f"test accuracy {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
