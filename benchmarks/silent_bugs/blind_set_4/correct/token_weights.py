"""Gradient accumulation in which each token of the global batch has the same weight."""
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

PAD = -100


class Tagger(nn.Module):
    def __init__(self, vocab=30, width=20, tags=5):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.out = nn.Linear(width, tags)

    def forward(self, ids):
        h = self.conv(self.embed(ids).transpose(1, 2)).relu()
        return self.out(h.transpose(1, 2))


def micro_batch(g, rank):
    length = int(torch.randint(4, 14, (1,), generator=g)) + 3 * rank
    ids = torch.randint(0, 30, (4, length), generator=g)
    tags = ids % 5
    tags[torch.rand(tags.shape, generator=g) < 0.3] = PAD
    return ids, tags


def update(model, optimizer, micros):
    tokens = torch.tensor(float(sum((t != PAD).sum() for _, t in micros)))
    dist.all_reduce(tokens)
    # DDP averages over ranks, the loss is a mean over the tokens of all ranks
    scale = dist.get_world_size() / tokens
    total = torch.zeros(())
    for i, (ids, tags) in enumerate(micros):
        last = i == len(micros) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(ids).flatten(0, 1), tags.flatten(), ignore_index=PAD, reduction="sum")
            (loss * scale).backward()
            total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return (total / tokens).item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Tagger())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(5 + rank)
    for step in range(12):
        value = update(model, optimizer, [micro_batch(g, rank) for _ in range(3)])
        if rank == 0 and step % 3 == 2:
            print(f"update {step + 1} loss per token {value:.4f}")
    dist.destroy_process_group()
