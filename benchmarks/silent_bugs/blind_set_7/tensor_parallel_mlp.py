"""Residual MLP whose feed-forward layers are split over the ranks (column, then row)."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

DIM, HIDDEN, DEPTH, CLASSES = 24, 64, 3, 6


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class ParallelFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        up = torch.randn(HIDDEN, DIM) / DIM ** 0.5
        down = torch.randn(DIM, HIDDEN) / HIDDEN ** 0.5
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Parameter(up.chunk(world, dim=0)[rank].clone())
        self.up_bias = nn.Parameter(torch.zeros(HIDDEN // world))
        self.down = nn.Parameter(down.chunk(world, dim=1)[rank].clone())
        self.down_bias = nn.Parameter(torch.zeros(DIM))
        for p in (self.up, self.up_bias, self.down):
            p.sharded = True

    def forward(self, x):
        h = CopyToRanks.apply(self.norm(x))
        h = F.gelu(F.linear(h, self.up, self.up_bias))
        return x + SumOverRanks.apply(F.linear(h, self.down)) + self.down_bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(10, DIM)
        self.blocks = nn.Sequential(*[ParallelFeedForward() for _ in range(DEPTH)])
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        return self.head(self.blocks(self.inp(x)))


def clip_grad_norm(params, max_norm):
    """Global norm: the shards add up over the ranks, the replicated gradients count once."""
    shards, whole = torch.zeros(()), torch.zeros(())
    for p in params:
        if getattr(p, "sharded", False):
            shards += p.grad.pow(2).sum()
        else:
            whole += p.grad.pow(2).sum()
    dist.all_reduce(shards)
    norm = (shards + whole).sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in params:
        p.grad.mul_(scale)
    return norm


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    teacher = torch.Generator().manual_seed(8)
    w1, w2 = torch.randn(10, 40, generator=teacher), torch.randn(40, CLASSES, generator=teacher)
    x = torch.randn(n, 10, generator=g)
    return TensorDataset(x, ((x @ w1).tanh() @ w2).argmax(1))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all ranks draw the full matrices and keep their slice
    model = Net()
    params = list(model.parameters())
    opt = torch.optim.SGD(params, lr=0.3, momentum=0.9)
    # every rank works on the same batches
    loader = DataLoader(make_data(1024, 1), batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(2))
    x_val, y_val = make_data(256, 2).tensors
    for epoch in range(6):
        total, norms = 0.0, 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            norms += clip_grad_norm(params, max_norm=0.5).item()
            opt.step()
            total += loss.item()
        with torch.no_grad():
            acc = (model(x_val).argmax(1) == y_val).float().mean().item()
        if rank == 0:
            print(f"epoch {epoch} loss {total / len(loader):.5f} grad norm {norms / len(loader):.5f} acc {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
