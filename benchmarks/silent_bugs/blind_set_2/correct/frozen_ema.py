import copy
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Tuned(nn.Module):
    """A frozen 'pretrained' trunk with batch norm, and a trainable head."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))
        for p in self.trunk.parameters():
            p.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.trunk.eval()      # the trunk's running statistics stay as they are
        return self

    def forward(self, x):
        return self.head(self.trunk(x))


@torch.no_grad()
def ema_update(ema, model, decay):
    for e, p in zip(ema.parameters(), model.parameters()):
        e.lerp_(p, 1 - decay)
    for e, b in zip(ema.buffers(), model.buffers()):
        e.copy_(b)


@torch.no_grad()
def score(model, x, y, rank, world):
    model.eval()
    xs, ys = x[rank::world], y[rank::world]
    c = torch.tensor([(model(xs).argmax(1) == ys).sum().item(), len(ys)], dtype=torch.float64)
    dist.all_reduce(c)
    return (c[0] / c[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = Tuned().train()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(421, 12, generator=g)
    y = (x @ torch.randn(12, 3, generator=g)).argmax(1)
    train = TensorDataset(x[:320], y[:320])
    ddp = DDP(model)
    ema = copy.deepcopy(ddp.module).eval().requires_grad_(False)
    opt = torch.optim.Adam((p for p in ddp.parameters() if p.requires_grad), lr=0.01)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    for epoch in range(4):
        ddp.train()
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(ddp(xb), yb).backward()
            opt.step()
            ema_update(ema, ddp.module, decay=0.9)
        a = score(ddp.module, x[320:], y[320:], rank, world)
        b = score(ema, x[320:], y[320:], rank, world)
        if rank == 0:
            print(f"epoch {epoch} model {a:.3f} ema {b:.3f}")
    if rank == 0:
        torch.save(ema.state_dict(), "/tmp/blind2/correct/frozen_ema.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
