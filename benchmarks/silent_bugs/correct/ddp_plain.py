"""DDP as in the tutorial: equal shards of each batch, mean loss, set_epoch, sums of counts in the evaluation."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data(seed, size):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(size, 1, 8, 8, generator=generator)
    return TensorDataset(images, images.sum((1, 2)).argmax(1))


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 8)))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train, test = make_data(1, 512), make_data(2, 128)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=64 // world_size, sampler=sampler)
    test_loader = DataLoader(test, 32, sampler=DistributedSampler(test, shuffle=False))  # 128: no padding

    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
        model.eval()
        correct = torch.tensor(0)
        with torch.no_grad():
            for images, labels in test_loader:
                correct += (model(images).argmax(1) == labels).sum()
        dist.all_reduce(correct)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.6f} accuracy {correct.item() / len(test):.4f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
