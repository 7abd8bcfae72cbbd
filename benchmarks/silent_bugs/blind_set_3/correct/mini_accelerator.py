"""A wrapper in the manner of Accelerate: prepare(), backward(), gather(), one script for one or many ranks."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Accelerator:
    def __init__(self):
        self.num_processes = int(os.environ.get("WORLD_SIZE", 1))
        self.process_index = int(os.environ.get("RANK", 0))
        if self.num_processes > 1:
            dist.init_process_group("gloo")
        torch.set_num_threads(1)

    @property
    def is_main_process(self):
        return self.process_index == 0

    def prepare(self, *objects):
        return tuple(self._prepare(o) for o in objects)

    def _prepare(self, obj):
        if self.num_processes == 1:
            return obj
        if isinstance(obj, nn.Module):
            return nn.parallel.DistributedDataParallel(obj)
        if isinstance(obj, DataLoader):
            shuffle = isinstance(obj.sampler, torch.utils.data.RandomSampler)
            sampler = DistributedSampler(obj.dataset, shuffle=shuffle, drop_last=shuffle)
            return DataLoader(obj.dataset, batch_size=obj.batch_size, sampler=sampler, drop_last=obj.drop_last)
        return obj

    def backward(self, loss):
        loss.backward()

    def gather_for_metrics(self, tensor, total):
        if self.num_processes == 1:
            return tensor
        out = [torch.empty_like(tensor) for _ in range(self.num_processes)]
        dist.all_gather(out, tensor)
        return torch.stack(out, 1).flatten(0, 1)[:total]  # the sampler deals the samples out in turn

    def print(self, *args):
        if self.is_main_process:
            print(*args)

    def end(self):
        if self.num_processes > 1:
            dist.destroy_process_group()


def get_loaders(batch_size=16):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(363, 12, generator=g)
    y = (x[:, :3].sum(1) > 0).long() + (x[:, 3:6].sum(1) > 0).long()
    train, val = TensorDataset(x[:288], y[:288]), TensorDataset(x[288:], y[288:])
    return DataLoader(train, batch_size=batch_size, shuffle=True, drop_last=True), DataLoader(val, batch_size=75)


def main():
    accelerator = Accelerator()
    torch.manual_seed(7)
    train_loader, eval_loader = get_loaders()
    total = len(eval_loader.dataset)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    for epoch in range(4):
        if hasattr(train_loader.sampler, "set_epoch"):
            train_loader.sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            hits = torch.cat([(model(x).argmax(1) == y).long() for x, y in eval_loader])
        hits = accelerator.gather_for_metrics(hits, total)
        accelerator.print(f"epoch {epoch}: accuracy {hits.float().mean().item():.4f} on {len(hits)} samples")
    accelerator.end()


if __name__ == "__main__":
    main()
