import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class MultiTask(nn.Module):
    def __init__(self, dim=14):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, 40), nn.Tanh())
        self.depth = nn.Linear(40, 1)
        self.segment = nn.Linear(40, 5)

    def forward(self, x):
        h = self.trunk(x)
        return self.depth(h).squeeze(-1), self.segment(h)


def project(first, second):
    """Remove from each task's gradient the part that opposes the other."""
    dot = sum((a * b).sum() for a, b in zip(first, second))
    if dot >= 0:
        return [a + b for a, b in zip(first, second)]
    na = sum(a.pow(2).sum() for a in first)
    nb = sum(b.pow(2).sum() for b in second)
    return [a - dot / nb * b + b - dot / na * a for a, b in zip(first, second)]


def task_gradients(losses, params):
    for loss in losses:
        grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
        yield [torch.zeros_like(p) if g is None else g for g, p in zip(grads, params)]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(MultiTask())
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    gen = torch.Generator().manual_seed(70 + rank)
    for step in range(20):
        x = torch.randn(16, 14, generator=gen)
        depth, segment = model(x)
        losses = (
            F.l1_loss(depth, x[:, 0] - x[:, 1]),
            F.cross_entropy(segment, x[:, 2:7].argmax(1)),
        )
        first, second = task_gradients(losses, params)
        for g in first + second:
            dist.all_reduce(g)
            g /= dist.get_world_size()
        for p, g in zip(params, project(first, second)):
            p.grad = g
        optimizer.step()
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1} depth {losses[0].item():.4f} segment {losses[1].item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
