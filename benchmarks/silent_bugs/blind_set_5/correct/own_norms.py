import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def shapes(count, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (count,), generator=g)
    x = 0.3 * torch.randn(count, 1, 10, 10, generator=g)
    for n in range(count):
        if y[n] == 0:
            x[n, 0, 4:6] += 1
        elif y[n] == 1:
            x[n, 0, :, 4:6] += 1
        else:
            x[n, 0].diagonal().add_(2)
    return TensorDataset(x, y)


def conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))


@torch.no_grad()
def test(net, data):
    """Rank 0 looks at the whole test set and tells the others."""
    result = torch.zeros(1)
    if dist.get_rank() == 0:
        net.eval()
        hits = sum((net(x).argmax(1) == y).sum() for x, y in DataLoader(data, 32))
        result[0] = hits / len(data)
        net.train()
    dist.broadcast(result, 0)
    return result.item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=0.05)
    a = p.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(17 + dist.get_rank())
    train, held = shapes(192, 1), shapes(60, 2)
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, a.batch // dist.get_world_size(), sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(conv(1, 8), conv(8, 16), nn.Flatten(), nn.Linear(64, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=a.lr, momentum=0.9, nesterov=True)
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = test(model.module, held)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
