"""Mixed precision with a gradient scaler; the second half of the run continues from a checkpoint."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(1)


class Run:
    def __init__(self, data, rank):
        torch.manual_seed(4)
        self.rank = rank
        self.loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, seed=2))
        self.net = Net()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=6)
        self.epoch = 0

    def wrap(self):
        self.model = DDP(self.net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def train_epoch(self):
        self.loader.sampler.set_epoch(self.epoch)
        for x, y in self.loader:
            self.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                pred = self.model(x)
            loss = F.smooth_l1_loss(pred.float(), y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.epoch += 1
        return loss.item()

    def save(self, path):
        if self.rank == 0:
            torch.save({"net": self.net.state_dict(), "scaler": self.scaler.state_dict(), "epoch": self.epoch}, path)
        dist.barrier()

    def load(self, path):
        ckpt = torch.load(path, weights_only=True)
        self.epoch = ckpt["epoch"]
        if self.rank == 0:  # DDP sends the weights to the other ranks
            self.net.load_state_dict(ckpt["net"])
        self.scaler.load_state_dict(ckpt["scaler"])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(256, 10, generator=g)
    data = TensorDataset(x, torch.sin(x[:, 0]) + 0.5 * x[:, 1])
    where = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(where)
    path = os.path.join(where[0], "amp.pt")

    first = Run(data, rank)
    first.wrap()
    for _ in range(2):
        first.train_epoch()
    first.save(path)

    second = Run(data, rank)
    second.load(path)
    second.wrap()
    for _ in range(2):
        loss = second.train_epoch()
        print(f"rank {rank} epoch {second.epoch} loss {loss:.4f} scale {second.scaler.get_scale():.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
