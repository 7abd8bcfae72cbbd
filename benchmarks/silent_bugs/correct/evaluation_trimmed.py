"""Evaluation through a padding sampler whose repeated samples are cut off by hand after everything was gathered."""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data(seed, size):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(size, 16, generator=generator)
    return TensorDataset(features, features[:, :4].argmax(1))


@torch.no_grad()
def evaluate(model, dataset):
    model.eval()
    sampler = DistributedSampler(dataset, shuffle=False)
    outputs = torch.cat([model(features) for features, _ in DataLoader(dataset, 16, sampler=sampler)])
    gathered = [torch.empty_like(outputs) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, outputs)
    logits = torch.stack(gathered, 1).flatten(0, 1)[: len(dataset)]  # back in order, without the repeated ones
    model.train()
    labels = dataset.tensors[1]
    return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, test = make_data(1, 256), make_data(2, 101)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 32 // world_size, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for features, labels in loader:
            loss = F.cross_entropy(model(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        test_loss, accuracy = evaluate(model, test)
        if rank == 0:
            print(f"epoch {epoch} test loss {test_loss:.6f} accuracy {accuracy:.4f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
