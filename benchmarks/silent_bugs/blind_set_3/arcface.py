"""Embedding network with an ArcFace loss: the class centres belong to the loss function."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ArcFaceLoss(nn.Module):
    def __init__(self, num_classes, embedding_size, margin=0.2, scale=16.0):
        super().__init__()
        self.W = nn.Parameter(torch.randn(num_classes, embedding_size) * 0.1)
        self.margin, self.scale = margin, scale

    def forward(self, embeddings, labels):
        cosine = F.normalize(embeddings) @ F.normalize(self.W).T
        theta = torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6))
        target = F.one_hot(labels, len(self.W)).bool()
        theta = torch.where(target, (theta + self.margin).clamp(max=math.pi), theta)
        return F.cross_entropy(self.scale * theta.cos(), labels)


class Trunk(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv1d(8, 16, 5, stride=2), nn.ReLU())
        self.fc = nn.Linear(16 * 5, size)

    def forward(self, x):
        return self.fc(self.conv(x).flatten(1))


def signals(n=288, classes=6):
    g = torch.Generator().manual_seed(14)
    y = torch.randint(0, classes, (n,), generator=g)
    t = torch.linspace(0, 6.28, 32)
    x = torch.sin(t[None] * (1 + y[:, None].float()) + torch.rand(n, 1, generator=g))
    return TensorDataset((x + 0.3 * torch.randn(n, 32, generator=g))[:, None], y)


def accuracy(model, loss_fn, data):
    x, y = data.tensors
    centres = getattr(loss_fn, "module", loss_fn).W
    with torch.no_grad():
        return ((F.normalize(model.module(x)) @ F.normalize(centres).T).argmax(1) == y).float().mean().item()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = signals()
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DDP(Trunk())
    loss_fn = DDP(ArcFaceLoss(6, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss_optimizer = torch.optim.SGD(loss_fn.parameters(), lr=0.5)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss_optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            loss_optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} accuracy {accuracy(model, loss_fn, data):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
