import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def rows(count, seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 20, (count, 9), generator=g)
    ids[:, 1:] = (ids[:, :1] + torch.arange(1, 9) * (1 + ids[:, :1] % 3)) % 20
    return ids


class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Embedding(20, 24), nn.Embedding(20, 24)
        self.out = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 20))

    def forward(self, ids):
        return self.out(self.last(ids) + self.first(ids[:, :1]))


def nll(model, ids, reduction):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)


@torch.inference_mode()
def perplexity(model, ids, rank, world, size=5):
    """Each row once: rank r takes rows r, r + world, ... of 21, so ranks have unequal shares."""
    mine = ids[rank::world]
    stats = torch.zeros(3, dtype=torch.float64)
    for chunk in mine.split(size):
        logits = model(chunk[:, :-1])
        stats[0] += F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten(), reduction="sum")
        stats[1] += (logits.argmax(-1) == chunk[:, 1:]).sum()
        stats[2] += chunk[:, 1:].numel()
    dist.all_reduce(stats)
    return math.exp(stats[0] / stats[2]), (stats[1] / stats[2]).item(), int(stats[2])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, val = rows(64, 1), rows(21, 2)
    torch.manual_seed(0)
    net = Bigram()
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    best = float("inf")
    for epoch in range(4):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(epoch))
        for batch in train[order[rank::world]].split(8):
            loss = nll(model, batch, "mean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        net.eval()
        ppl, acc, tokens = perplexity(net, val, rank, world)
        net.train()
        stop = ppl > 1.5 * best  # the same on all ranks
        best = min(best, ppl)
        if rank == 0:
            print(f"epoch {epoch} ppl {ppl:.3f} acc {acc:.3f} over {tokens} tokens")
        if stop:
            break
    dist.destroy_process_group()


main()
