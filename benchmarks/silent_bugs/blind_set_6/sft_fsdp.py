# Supervised fine-tuning with FSDP2. Only the answer tokens carry a loss.
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

VOCAB, MAXLEN, IGNORE = 40, 40, -100
ACCUM, MICRO_BATCH, EPOCHS, LR = 2, 4, 4, 1e-3


class ChatDataset(Dataset):
    """Prompt of 3-8 tokens, answer of 1-30 tokens that continues the prompt."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            lp = int(torch.randint(3, 9, (1,), generator=g))
            la = int(1 + 29 * torch.rand(1, generator=g) ** 2)
            start, stride = torch.randint(1, VOCAB, (2,), generator=g).tolist()
            seq = [(start + stride % 7 * i) % (VOCAB - 1) + 1 for i in range(lp + la)]
            self.rows.append((seq, lp))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        seq, lp = self.rows[i]
        ids = torch.zeros(MAXLEN, dtype=torch.long)
        labels = torch.full((MAXLEN,), IGNORE)
        ids[:len(seq)] = torch.tensor(seq)
        labels[lp - 1:len(seq) - 1] = ids[lp:len(seq)]  # shifted by one
        return ids, labels


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.h = h

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class LM(nn.Module):
    def __init__(self, d=48, layers=2, heads=4):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, d), nn.Embedding(MAXLEN, d)
        self.layers = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def nll_sum(model, ids, labels):
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(1)
    model = LM()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=LR)

    train_set, val_set = ChatDataset(384, seed=3), ChatDataset(64, seed=4)
    sampler = DistributedSampler(train_set, world, rank, shuffle=True, drop_last=True)
    loader = DataLoader(train_set, MICRO_BATCH, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val_set, 8, sampler=DistributedSampler(val_set, world, rank, shuffle=False))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        seen = torch.zeros(2, dtype=torch.float64)
        batches = iter(loader)
        for _ in range(len(loader) // ACCUM):
            window = [next(batches) for _ in range(ACCUM)]
            # all answer tokens of this optimizer step, over micro batches and ranks
            n_tokens = torch.tensor(float(sum((lab != IGNORE).sum() for _, lab in window)))
            dist.all_reduce(n_tokens)
            opt.zero_grad()
            for i, (ids, labels) in enumerate(window):
                model.set_requires_gradient_sync(i == ACCUM - 1)
                loss_sum = nll_sum(model, ids, labels)
                # FSDP averages the gradients over the ranks
                loss = loss_sum * world / n_tokens
                loss.backward()
                seen += torch.tensor([loss_sum.item(), (labels != IGNORE).sum().item()], dtype=torch.float64)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        dist.all_reduce(seen)

        model.eval()
        val = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for ids, labels in val_loader:
                val += torch.tensor([nll_sum(model, ids, labels).item(), (labels != IGNORE).sum().item()],
                                    dtype=torch.float64)
        dist.all_reduce(val)
        if rank == 0:
            v = (val[0] / val[1]).item()
            print(f"epoch {epoch} train nll {(seen[0] / seen[1]).item():.4f} val nll {v:.4f} "
                  f"ppl {math.exp(v):.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
