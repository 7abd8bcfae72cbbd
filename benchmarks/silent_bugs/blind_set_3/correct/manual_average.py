"""Data parallel by hand: every rank differentiates its part, the gradients are averaged, no wrapper."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def average_gradients(model):
    world = float(dist.get_world_size())
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
            param.grad /= world


def partition(n, seed):
    """The indices of this rank, drawn from one permutation."""
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=g)
    return order[dist.get_rank()::dist.get_world_size()]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3)
        self.conv2 = nn.Conv2d(6, 12, 3)
        self.fc1 = nn.Linear(12 * 4, 32)
        self.fc2 = nn.Linear(32, 5)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def data(n=320):
    g = torch.Generator().manual_seed(3)
    proto = torch.rand(5, 1, 14, 14, generator=g)
    y = torch.randint(0, 5, (n,), generator=g)
    return proto[y] + 0.4 * torch.randn(n, 1, 14, 14, generator=g), y


def run(rank, size):
    torch.manual_seed(1234)
    x, y = data()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    bsz = 32 // size
    for epoch in range(3):
        epoch_loss = 0.0
        index = partition(len(x), 1234 + epoch).split(bsz)
        for part in index:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[part]), y[part])
            epoch_loss += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        print(f"Rank {rank}, epoch {epoch}: {epoch_loss / len(index):.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.destroy_process_group()
