import contextlib
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def windows(loader, size):
    """Lists of up to `size` batches; the last list may be shorter."""
    held = []
    for batch in loader:
        held.append(batch)
        if len(held) == size:
            yield held
            held = []
    if held:
        yield held


class Trainer:
    def __init__(self, accum=3):
        self.rank, self.world, self.accum = dist.get_rank(), dist.get_world_size(), accum
        torch.manual_seed(0)
        g = torch.Generator().manual_seed(1)
        x = torch.randn(320, 16, generator=g)
        y = (x @ torch.randn(16, 5, generator=g)).argmax(1)
        data = TensorDataset(x, y)
        self.sampler = DistributedSampler(data, seed=7)
        self.loader = DataLoader(data, batch_size=20, sampler=self.sampler)
        self.model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5)))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def update(self, batches):
        self.opt.zero_grad()
        total = torch.zeros(())
        for k, (x, y) in enumerate(batches):
            final = k == len(batches) - 1
            with contextlib.nullcontext() if final else self.model.no_sync():
                loss = F.cross_entropy(self.model(x), y) / len(batches)
                loss.backward()
            total += loss.detach() * len(batches)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        return total

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            total = sum(self.update(b) for b in windows(self.loader, self.accum))
            dist.all_reduce(total)
            if self.rank == 0:
                print(f"epoch {epoch} loss {total.item() / (len(self.loader) * self.world):.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer().fit(4)
    dist.destroy_process_group()
