"""nanoGPT-like training with fully_shard."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, CONTEXT, DIM, HEADS, LAYERS = 40, 32, 48, 4, 2


class CausalBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.proj = nn.Linear(DIM, DIM)
        self.ln_2 = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        B, L, _ = x.shape
        q, k, v = (t.view(B, L, HEADS, -1).transpose(1, 2) for t in self.qkv(self.ln_1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, L, DIM))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, DIM)
        self.wpe = nn.Embedding(CONTEXT, DIM)
        self.h = nn.ModuleList(CausalBlock() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_text(n=20000):
    g = torch.Generator().manual_seed(4)
    nxt = torch.randint(0, VOCAB, (VOCAB, 3), generator=g)
    choice = torch.randint(0, 3, (n,), generator=g)
    out = [0]
    for c in choice.tolist():
        out.append(nxt[out[-1], c].item())
    return torch.tensor(out)


def get_batch(data, batch_size, generator, rank, world):
    """Draw the global batch with a shared generator and take this rank's rows."""
    ix = torch.randint(0, len(data) - CONTEXT - 1, (batch_size * world,), generator=generator)
    rows = [data[i:i + CONTEXT + 1] for i in ix[rank::world].tolist()]
    chunk = torch.stack(rows)
    return chunk[:, :-1], chunk[:, 1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-iters", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    data = make_text()
    train_data, val_data = data[:18000], data[18000:]

    torch.manual_seed(1337)
    model = GPT()
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)

    def lr_at(it, warmup=10):
        if it < warmup:
            return args.lr * (it + 1) / warmup
        progress = (it - warmup) / (args.max_iters - warmup)
        return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

    def estimate_val_loss():
        model.eval()
        g = torch.Generator().manual_seed(99)
        with torch.no_grad():
            losses = torch.stack([model(*get_batch(val_data, 16, g, rank, world)) for _ in range(4)])
        model.train()
        mean = losses.mean()
        dist.all_reduce(mean)
        return mean.item() / world

    batches = torch.Generator().manual_seed(1337)
    for it in range(args.max_iters):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(it)
        x, y = get_batch(train_data, args.batch_size, batches, rank, world)
        loss = model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        if (it + 1) % 15 == 0:
            train = loss.detach().clone()
            dist.all_reduce(train)
            val = estimate_val_loss()
            if rank == 0:
                print(f"iter {it + 1}: train loss {train.item() / world:.4f}, val loss {val:.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
