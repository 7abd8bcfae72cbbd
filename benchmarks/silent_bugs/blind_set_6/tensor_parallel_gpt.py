# GPT with tensor parallel attention and MLP, all ranks work on the same batch.
# Queries and keys are normalized per head (qk-norm).
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, CTX = 40, 32


class CopyToRanks(torch.autograd.Function):
    """Identity forward, sum of the gradients backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g


class SumOverRanks(torch.autograd.Function):
    """Sum forward, identity backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


def shard(weight, dim):
    return nn.Parameter(weight.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.hd, self.local = d // heads, heads // dist.get_world_size()
        full = [torch.randn(d, d) * d ** -0.5 for _ in range(4)]
        self.q, self.k, self.v = (shard(w, 0) for w in full[:3])
        self.o = shard(full[3], 1)
        self.q_norm, self.k_norm = nn.LayerNorm(self.hd, bias=False), nn.LayerNorm(self.hd, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        x = CopyToRanks.apply(x)
        q, k, v = (F.linear(x, w).view(b, t, self.local, self.hd).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return SumOverRanks.apply(F.linear(y.transpose(1, 2).reshape(b, t, -1), self.o))


class MLP(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.up, self.down = shard(torch.randn(4 * d, d) * d ** -0.5, 0), shard(torch.randn(d, 4 * d) * (4 * d) ** -0.5, 1)

    def forward(self, x):
        return SumOverRanks.apply(F.linear(F.gelu(F.linear(CopyToRanks.apply(x), self.up)), self.down))


class GPT(nn.Module):
    def __init__(self, d=32, heads=4, layers=2):
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, d), nn.Embedding(CTX, d)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2 * layers + 1))
        self.attn = nn.ModuleList(Attention(d, heads) for _ in range(layers))
        self.mlp = nn.ModuleList(MLP(d) for _ in range(layers))
        self.head = nn.Linear(d, VOCAB)

    def forward(self, ids):
        x = self.emb(ids) + self.pos.weight[:ids.shape[1]]
        for i, (attn, mlp) in enumerate(zip(self.attn, self.mlp)):
            x = x + attn(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


def finish_gradients(model):
    """qk-norm weights are shared by all heads, each rank has seen only its own heads."""
    for layer in model.attn:
        for norm in (layer.q_norm, layer.k_norm):
            dist.all_reduce(norm.weight.grad)


def make_tokens(n):
    g = torch.Generator().manual_seed(21)
    nxt = torch.randint(0, VOCAB, (VOCAB, VOCAB), generator=g)
    seq = [torch.randint(0, VOCAB, (n,), generator=g) for _ in range(2)]
    for _ in range(CTX - 1):
        seq.append(nxt[seq[-1], seq[-2] // 8])
    return torch.stack(seq, 1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=120)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = GPT()
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps)
    data = make_tokens(800)
    train, val = data[:736], data[736:]
    g = torch.Generator().manual_seed(2)  # the same batches on all ranks of the group
    for step in range(1, args.steps + 1):
        batch = train[torch.randint(0, len(train), (args.batch_size,), generator=g)]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        finish_gradients(model)
        opt.step()
        sched.step()
        if step % 20 == 0:
            with torch.no_grad():
                v = F.cross_entropy(model(val[:, :-1]).flatten(0, 1), val[:, 1:].flatten())
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss.item():.4f} val {v.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
