"""Stops in the middle of an epoch and goes on with exactly the samples that were not yet seen."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset

PATH = "/tmp/blind2/correct/resumable.pt"


class ResumableSampler(Sampler):
    """`done` counts the samples of this epoch used over all ranks."""

    def __init__(self, n, seed=0):
        self.n, self.seed, self.epoch, self.done = n, seed, 0, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed * 100003 + self.epoch)
        order = torch.randperm(self.n, generator=g)
        order = order[: self.n - self.n % self.world][self.done:]
        return iter(order[self.rank::self.world].tolist())

    def __len__(self):
        return (self.n - self.n % self.world - self.done) // self.world

    def next_epoch(self):
        self.epoch, self.done = self.epoch + 1, 0


class Job:
    def __init__(self):
        torch.manual_seed(0)
        g = torch.Generator().manual_seed(1)
        x = torch.randn(240, 6, generator=g)
        self.data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
        self.sampler = ResumableSampler(len(self.data))
        self.model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
        self.opt = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def save(self):
        if dist.get_rank() == 0:
            torch.save({"model": self.model.state_dict(), "opt": self.opt.state_dict(),
                        "epoch": self.sampler.epoch, "done": self.sampler.done}, PATH)
        dist.barrier()

    def load(self):
        c = torch.load(PATH)
        self.model.load_state_dict(c["model"])
        self.opt.load_state_dict(c["opt"])
        self.sampler.epoch, self.sampler.done = c["epoch"], c["done"]

    def run(self, epochs, quit_at=None):
        ddp = DDP(self.model)
        steps = 0
        while self.sampler.epoch < epochs:
            total = torch.zeros(2)
            for x, y in DataLoader(self.data, batch_size=12, sampler=self.sampler):
                loss = (ddp(x) - y).pow(2).mean()
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.sampler.done += len(x) * dist.get_world_size()
                total += torch.tensor([loss.item() * len(x), len(x)])
                steps += 1
                if steps == quit_at:
                    return self.save()
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(f"epoch {self.sampler.epoch} mse {(total[0] / total[1]).item():.5f} on {int(total[1])} samples")
            self.sampler.next_epoch()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Job().run(epochs=3, quit_at=14)   # killed in the second epoch
    again = Job()
    again.load()
    again.run(epochs=3)
    dist.destroy_process_group()
