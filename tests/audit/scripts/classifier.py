"""A classifier under DistributedDataParallel: sampler, evaluation of shards, a checkpoint an epoch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split


def evaluate(model, held_out, rank, world_size):
    model.eval()
    loader = DataLoader(Subset(held_out, range(rank, len(held_out), world_size)), 5)
    totals = torch.zeros(3)
    with torch.no_grad():
        for inputs, labels in loader:
            output = model.module(inputs)
            loss = F.cross_entropy(output, labels)
            hits = (output.argmax(1) == labels).sum()
            totals += torch.tensor([loss * len(labels), hits, len(labels)])
    dist.all_reduce(totals)
    model.train()
    return totals[0] / totals[2], totals[1] / totals[2]


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(124, 12), torch.randint(0, 4, (124,)))
    train, held_out = random_split(data, [101, 23], torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    model = DistributedDataParallel(model)
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 7, sampler=sampler, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        loss, accuracy = evaluate(model, held_out, rank, world_size)
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.6f} accuracy {accuracy:.4f}")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, "last.pt")
    dist.barrier()
    dist.destroy_process_group()


main()
