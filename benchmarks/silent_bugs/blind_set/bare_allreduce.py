"""Data parallel without wrappers: every process computes gradients on its own
part of the data and the gradients are averaged before the step.
"""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

SEED = 2024
EPOCHS = 5
BATCH = 25
LR = 0.05


def spiral(n_per_class=200, classes=3):
    g = torch.Generator().manual_seed(8)
    points, labels = [], []
    for c in range(classes):
        r = torch.linspace(0.05, 1, n_per_class)
        t = r * 4 + c * 2 * torch.pi / classes + 0.15 * torch.randn(n_per_class, generator=g)
        points.append(torch.stack([r * torch.sin(t), r * torch.cos(t)], 1))
        labels.append(torch.full((n_per_class,), c))
    return torch.cat(points), torch.cat(labels)


class Net(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.inp = nn.Linear(2, hidden)
        self.mid = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 3)

    def forward(self, x):
        x = torch.tanh(self.inp(x * 3))
        x = torch.tanh(self.mid(x))
        return self.out(x)


def average_gradients(model):
    world = float(dist.get_world_size())
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad /= world


def my_batches(x, y, epoch, rank, world):
    g = torch.Generator().manual_seed(SEED * 1000 + epoch)
    order = torch.randperm(len(x), generator=g)
    usable = len(order) // (BATCH * world) * BATCH * world
    order = order[:usable].view(-1, world, BATCH)[:, rank]
    for idx in order:
        yield x[idx], y[idx]


def augment(x):
    return x + 0.02 * torch.randn_like(x)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED + rank)

    x, y = spiral()
    model = Net()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(EPOCHS):
        sum_loss, n = torch.zeros(1), 0
        for xb, yb in my_batches(x, y, epoch, rank, world):
            optimizer.zero_grad()
            loss = loss_fn(model(augment(xb)), yb)
            loss.backward()
            average_gradients(model)
            optimizer.step()
            sum_loss += loss.detach()
            n += 1
        sum_loss /= n
        dist.all_reduce(sum_loss)
        if rank == 0:
            print(f"epoch {epoch:2d}  loss {sum_loss.item() / world:.4f}")

    if rank == 0:
        with torch.no_grad():
            accuracy = (model(x).argmax(1) == y).float().mean().item()
        print(f"accuracy {accuracy:.4f}")
        if len(sys.argv) > 1:
            os.makedirs(os.path.dirname(sys.argv[1]) or ".", exist_ok=True)
            torch.save(model.state_dict(), sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
