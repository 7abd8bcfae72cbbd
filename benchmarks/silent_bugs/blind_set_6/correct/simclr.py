"""SimCLR: NT-Xent over the views of all processes, gathered with gradients."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class GatherLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return torch.stack(out)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad[dist.get_rank()]


class TwoViews(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(20, 1, 12, 12, generator=torch.Generator().manual_seed(3))
        self.y = torch.randint(0, 20, (n,), generator=g)
        self.x = self.x[self.y] + 0.8 * torch.randn(n, 1, 12, 12, generator=g)

    def __len__(self):
        return len(self.x)

    def view(self, x):
        x = torch.roll(x, tuple(torch.randint(-1, 2, (2,)).tolist()), dims=(1, 2))
        return x * (0.6 + 0.8 * torch.rand(())) + 0.2 * torch.randn(x.shape)

    def __getitem__(self, i):
        return self.view(self.x[i]), self.view(self.x[i])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
                                      nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten())
        self.project = nn.Sequential(nn.Linear(288, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x):
        return F.normalize(self.project(self.features(x)), dim=1)


def nt_xent(z1, z2, tau=0.3):
    """Loss of the own anchors against the views of all processes."""
    n, rank = len(z1), dist.get_rank()
    all1, all2 = GatherLayer.apply(z1).flatten(0, 1), GatherLayer.apply(z2).flatten(0, 1)
    keys = torch.cat([all1, all2])
    own = rank * n + torch.arange(n)
    total = len(all1)
    loss = 0
    for z, self_idx, pos_idx in ((z1, own, own + total), (z2, own + total, own)):
        logits = z @ keys.T / tau
        logits = logits.scatter(1, self_idx[:, None], float("-inf"))
        loss = loss + F.cross_entropy(logits, pos_idx)
    return loss / 2


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Encoder())
    torch.manual_seed(50 + rank)

    data = TwoViews(768, seed=1)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=64 // world, sampler=sampler, drop_last=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.2, total_steps=6 * len(loader))
    for epoch in range(6):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for v1, v2 in loader:
            z1, z2 = model(torch.cat([v1, v2])).chunk(2)
            loss = nt_xent(z1, z2)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"[{epoch}] nt-xent {total[0] / total[1]:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
