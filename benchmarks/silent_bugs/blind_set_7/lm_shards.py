"""Language model pre-training from tokenised shard files; every rank opens its own files."""
import math
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

VOCAB, BLOCK, SHARDS, PER_SHARD = 32, 24, 8, 96


def write_shards(folder):
    """Stands in for the tokenised corpus: an order-2 Markov text cut into blocks."""
    g = torch.Generator().manual_seed(0)
    table = torch.randn(VOCAB, VOCAB, generator=g) * 2.0
    for s in range(SHARDS):
        x = torch.zeros(PER_SHARD, BLOCK + 1, dtype=torch.long)
        x[:, 0] = torch.randint(VOCAB, (PER_SHARD,), generator=g)
        for t in range(BLOCK):
            probs = table[x[:, t]].softmax(-1)
            x[:, t + 1] = torch.multinomial(probs, 1, generator=g)[:, 0]
        torch.save(x, os.path.join(folder, f"shard{s:02d}.pt"))


def load_shards(folder, rank, world):
    names = sorted(n for n in os.listdir(folder) if n.startswith("shard"))
    return torch.cat([torch.load(os.path.join(folder, n)) for n in names[rank::world]])


class LM(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.pos = nn.Parameter(torch.zeros(BLOCK, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.register_buffer("mask", torch.full((BLOCK, BLOCK), float("-inf")).triu(1))

    def forward(self, idx):
        h = self.body(self.tok(idx) + self.pos, mask=self.mask)
        return self.head(self.norm(h))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    if rank == 0:
        write_shards(folder[0])
    dist.barrier()

    train_set = TensorDataset(load_shards(folder[0], rank, world))
    order = torch.Generator().manual_seed(1234 + rank)
    loader = DataLoader(train_set, batch_size=16, shuffle=True, generator=order, drop_last=True)

    torch.manual_seed(1234)
    model = DDP(LM())
    torch.manual_seed(1234 + rank)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    epochs = 4
    total_steps, warmup = epochs * len(loader), 10

    def lr_at(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, total_steps - warmup)))

    sched = torch.optim.lr_scheduler.LambdaLR(opt, lr_at)
    step = 0
    for epoch in range(epochs):
        for (block,) in loader:
            logits = model(block[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, VOCAB), block[:, 1:].reshape(-1))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            step += 1
            if step % 8 == 0:
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                if rank == 0:
                    print(f"epoch {epoch} step {step} loss {mean.item() / world:.4f} lr {sched.get_last_lr()[0]:.2e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
