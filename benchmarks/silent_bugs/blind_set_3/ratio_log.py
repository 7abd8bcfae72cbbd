"""Character model on sentences of different lengths; loss per token, logged at every update."""
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

PAD = 0


class LossTracker:
    """Collects the loss for the log."""

    def __init__(self):
        self.history = []

    def log(self, step, loss_sum, num_tokens, group=None):
        pair = torch.stack([loss_sum, num_tokens])
        dist.all_reduce(pair, group=group)
        value = pair[0] / pair[1].clamp(min=1)
        self.history.append({"step": step, "lm loss": round(value.item(), 5)})


class CharRNN(nn.Module):
    def __init__(self, vocab=30, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.rnn = nn.LSTM(dim, 48, batch_first=True)
        self.out = nn.Linear(48, vocab)

    def forward(self, ids):
        return self.out(self.rnn(self.embed(ids))[0])


def sentences(step, rank, batch=8):
    """Rank-dependent mix: some shards hold mostly short sentences."""
    g = torch.Generator().manual_seed(step * 17 + rank)
    longest = 30 if rank % 2 == 0 else 10
    rows = torch.full((batch, 31), PAD)
    for k in range(batch):
        n = int(torch.randint(4, longest, (1,), generator=g))
        start = int(torch.randint(1, 30, (1,), generator=g))
        rows[k, :n] = (start + torch.arange(n) * 2) % 29 + 1
    return rows[:, :-1], rows[:, 1:]


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), dist.get_world_size()
    torch.manual_seed(12)
    torch.set_num_threads(1)
    model = DDP(CharRNN())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tracker = LossTracker()
    for step in range(15):
        ids, targets = sentences(step, rank)
        mask = targets != PAD
        loss_sum = F.cross_entropy(model(ids).transpose(1, 2), targets, reduction="none")[mask].sum()
        num_tokens = mask.sum().float()
        total_tokens = num_tokens.clone()
        dist.all_reduce(total_tokens)
        optimizer.zero_grad()
        (loss_sum * world / total_tokens).backward()
        optimizer.step()
        tracker.log(step, loss_sum.detach().clone(), num_tokens)
    if rank == 0:
        for row in tracker.history[::5]:
            json.dump(row, sys.stdout)
            print()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
