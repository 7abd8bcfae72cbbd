"""Character-level GPT, DDP with bf16 autocast, gradient accumulation and a cosine schedule."""
import argparse
import contextlib
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

WORDS = "the a small large red blue cat dog bird fish sees likes hears follows and then slowly today".split()
CHARS = sorted(set(" ".join(WORDS) + "."))


class CharBlocks(Dataset):
    def __init__(self, n_words, block, seed):
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, len(WORDS), (n_words,), generator=g).tolist()
        text = " ".join(WORDS[i] + ("." if k % 9 == 8 else "") for k, i in enumerate(ids))
        self.data = torch.tensor([CHARS.index(c) for c in text])
        self.block = block

    def __len__(self):
        return (len(self.data) - 1) // self.block

    def __getitem__(self, i):
        s = i * self.block
        return self.data[s:s + self.block], self.data[s + 1:s + self.block + 1]


class Block(nn.Module):
    def __init__(self, d, heads, drop):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.drop, self.heads = nn.Dropout(drop), heads

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(b, t, d)))
        return x + self.drop(self.mlp(self.ln2(x)))


class GPT(nn.Module):
    def __init__(self, block, d=48, layers=2, heads=4, drop=0.1):
        super().__init__()
        self.tok, self.pos = nn.Embedding(len(CHARS), d), nn.Embedding(block, d)
        self.blocks = nn.Sequential(*[Block(d, heads, drop) for _ in range(layers)])
        self.ln, self.head = nn.LayerNorm(d), nn.Linear(d, len(CHARS))

    def forward(self, x):
        return self.head(self.ln(self.blocks(self.tok(x) + self.pos(torch.arange(x.shape[1])))))


def get_lr(step, warmup, total, peak):
    if step < warmup:
        return peak * (step + 1) / warmup
    return 0.1 * peak + 0.45 * peak * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--block", type=int, default=32)
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1337)
    raw = GPT(args.block)
    model = DDP(raw)
    torch.manual_seed(1337 + rank)  # dropout
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
                            lr=args.lr, betas=(0.9, 0.95))

    train_set, val_set = CharBlocks(6000, args.block, seed=1), CharBlocks(900, args.block, seed=2)
    sampler = DistributedSampler(train_set, world, rank, shuffle=True, drop_last=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    steps_per_epoch = len(loader) // args.accum
    total_steps = args.epochs * steps_per_epoch

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        it = iter(loader)
        for _ in range(steps_per_epoch):
            for group in opt.param_groups:
                group["lr"] = get_lr(step, 10, total_steps, args.lr)
            opt.zero_grad(set_to_none=True)
            step_loss = torch.zeros(())
            for micro in range(args.accum):
                x, y = next(it)
                with contextlib.nullcontext() if micro == args.accum - 1 else model.no_sync():
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        logits = model(x)
                    loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten()) / args.accum
                    loss.backward()
                step_loss += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            step += 1
            if step % 20 == 0:
                dist.all_reduce(step_loss)
                if rank == 0:
                    print(f"step {step}/{total_steps} loss {step_loss.item() / world:.4f}", flush=True)

        model.eval()
        tot = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for i in range(rank, len(val_set), world):
                x, y = val_set[i]
                tot[0] += F.cross_entropy(raw(x[None])[0], y, reduction="sum").double()
                tot[1] += len(y)
        dist.all_reduce(tot)
        if rank == 0:
            val = (tot[0] / tot[1]).item()
            print(f"epoch {epoch} val loss {val:.4f} bits per char {val / math.log(2):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
