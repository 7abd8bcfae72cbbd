import argparse
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.n2(x))


class Transformer(nn.Module):
    def __init__(self, vocab=32, d=32, layers=2, ctx=16):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.pos = nn.Parameter(torch.randn(ctx, d) * 0.02)
        self.blocks = nn.ModuleList(Block(d) for _ in range(layers))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        h = self.tok(ids) + self.pos[: ids.shape[1]]
        for b in self.blocks:
            h = b(h)
        return self.head(h)


def clip_gradients(params, max_norm):
    """Scale all gradients so that the norm of the whole gradient is at most max_norm."""
    grads = [p.grad.to_local() for p in params if p.grad is not None]
    sq = sum(g.float().pow(2).sum() for g in grads)
    dist.all_reduce(sq)
    norm = sq.sqrt()
    coef = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(coef)
    return norm


def corpus(n, ctx, vocab):
    g = torch.Generator().manual_seed(99)
    start = torch.randint(0, vocab, (n, 1), generator=g)
    step = torch.randint(1, 5, (n, 1), generator=g)
    return (start + step * torch.arange(ctx + 1)) % vocab


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=12)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--clip", type=float, default=0.3)
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Transformer()
    mesh = init_device_mesh("cpu", (world,))
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    data = corpus(512, 16, 32)
    picker = torch.Generator().manual_seed(4)
    for step in range(a.steps):
        idx = torch.randperm(len(data), generator=picker)[: a.batch]
        mine = data[idx[rank::world]]
        logits = model(mine[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        norm = clip_gradients(list(model.parameters()), a.clip)
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 3 == 2:
            print(f"step {step} loss {shown.item() / world:.4f} grad norm {norm.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
