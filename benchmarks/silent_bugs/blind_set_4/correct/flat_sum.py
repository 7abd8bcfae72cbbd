"""Data parallel by hand: sums of losses, one flat all-reduce, division by the rows of the global batch."""
import torch
import torch.distributed as dist
import torch.nn.functional as F


def make_params(seed):
    g = torch.Generator().manual_seed(seed)
    shapes = [(12, 24), (24,), (24, 3), (3,)]
    return [(torch.randn(*s, generator=g) * 0.2).requires_grad_() for s in shapes]


def forward(params, x):
    w1, b1, w2, b2 = params
    return torch.tanh(x @ w1 + b1) @ w2 + b2


@torch.no_grad()
def apply_update(params, rows, lr):
    count = torch.tensor([float(rows)])
    flat = torch.cat([p.grad.flatten() for p in params] + [count])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    total = flat[-1]
    start = 0
    for p in params:
        n = p.numel()
        p -= lr * flat[start : start + n].view_as(p) / total
        p.grad = None
        start += n
    return int(total)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    params = make_params(seed=3)  # the same on all ranks
    for p in params:
        dist.broadcast(p.detach(), src=0)
    g = torch.Generator().manual_seed(10 + rank)
    for step in range(20):
        rows = 8 + 4 * rank + step % 3  # ranks have batches of different sizes
        x = torch.randn(rows, 12, generator=g)
        y = x[:, :3].argmax(1)
        loss = F.cross_entropy(forward(params, x), y, reduction="sum")
        loss.backward()
        total = apply_update(params, rows, lr=0.5)
        if step % 5 == 4:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} loss {shown.item() / total:.4f} rows {total}")
    dist.destroy_process_group()


main()
