"""Local SGD: each rank trains alone for H steps, then the weights are averaged; momentum stays local."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average_weights(model):
    with torch.no_grad():
        flat = nn.utils.parameters_to_vector(model.parameters())
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat / dist.get_world_size(), model.parameters())


def spirals(n=384):
    g = torch.Generator().manual_seed(4)
    t = torch.rand(n, generator=g) * 3
    y = torch.randint(0, 3, (n,), generator=g)
    phi = t * 1.5 + y * 2.0944
    x = torch.stack([t * phi.cos(), t * phi.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g)
    return TensorDataset(x, y)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--sync-every", type=int, default=4)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--lr", type=float, default=0.05)
    a = p.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.SGD(model.parameters(), lr=a.lr, momentum=0.9)
    dataset = spirals()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    criterion = nn.CrossEntropyLoss()
    step = 0
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            criterion(model(x), y).backward()
            opt.step()
            step += 1
            if step % a.sync_every == 0:
                average_weights(model)
    average_weights(model)
    with torch.no_grad():
        x, y = dataset.tensors
        acc = (model(x).argmax(1) == y).float().mean()
    if dist.get_rank() == 0:
        print(f"{step} local updates, accuracy of the averaged model {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
