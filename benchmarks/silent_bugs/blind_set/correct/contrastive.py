"""Contrastive pretraining with negatives from all ranks."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

DIM, EMBED, GLOBAL_BATCH, STEPS, TEMPERATURE = 32, 16, 64, 30, 0.2


class GatherRows(torch.autograd.Function):
    """all_gather whose backward hands every rank the gradients of its rows."""

    @staticmethod
    def forward(ctx, rows):
        ctx.n = rows.size(0)
        pieces = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, rows.contiguous())
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        begin = dist.get_rank() * ctx.n
        return grad[begin : begin + ctx.n]


class Projector(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.proj = nn.Linear(64, EMBED)

    def forward(self, a, b):
        z = self.proj(self.trunk(torch.cat([a, b])))
        return F.normalize(z, dim=1).chunk(2)


def info_nce(z_a, z_b):
    """Mean over the local rows; the columns are the rows of all ranks."""
    all_a, all_b = GatherRows.apply(z_a), GatherRows.apply(z_b)
    labels = torch.arange(len(z_a)) + dist.get_rank() * len(z_a)
    loss_a = F.cross_entropy(z_a @ all_b.T / TEMPERATURE, labels)
    loss_b = F.cross_entropy(z_b @ all_a.T / TEMPERATURE, labels)
    return 0.5 * (loss_a + loss_b)


def views(step):
    """Two noisy views of the same items for the whole group; ranks cut their part."""
    g = torch.Generator().manual_seed(10_000 + step)
    basis = torch.randn(6, DIM, generator=torch.Generator().manual_seed(1))
    items = torch.randn(GLOBAL_BATCH, 6, generator=g) @ basis
    a = items + 0.5 * torch.randn(items.shape, generator=g)
    b = items + 0.5 * torch.randn(items.shape, generator=g)
    return a, b


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    n = GLOBAL_BATCH // world
    mine = slice(rank * n, (rank + 1) * n)

    torch.manual_seed(12)
    model = DDP(Projector())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    for step in range(STEPS):
        a, b = views(step)
        loss = info_nce(*model(a[mine], b[mine]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            shown = loss.detach()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1}: info nce {shown.item() / world:.5f}")

    if rank == 0:
        with torch.no_grad():
            z_a, z_b = model.module(*views(99_999))
        top1 = ((z_a @ z_b.T).argmax(1) == torch.arange(len(z_a))).float().mean()
        print(f"retrieval top1 {top1.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
