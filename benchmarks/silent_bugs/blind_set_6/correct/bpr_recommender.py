"""Matrix factorization with the BPR loss: random negatives per process, leave-one-out HR@10 and NDCG@10."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

USERS, ITEMS, PER_USER, DIM = 151, 120, 9, 16


def interactions(seed=0):
    g = torch.Generator().manual_seed(seed)
    u, v = torch.randn(USERS, 4, generator=g), torch.randn(ITEMS, 4, generator=g)
    prob = (1.5 * u @ v.T).softmax(dim=1)
    chosen = torch.multinomial(prob, PER_USER, generator=g)     # without replacement
    seen = torch.zeros(USERS, ITEMS, dtype=torch.bool).scatter_(1, chosen, True)
    train = torch.stack([torch.arange(USERS).repeat_interleave(PER_USER - 1), chosen[:, 1:].flatten()], dim=1)
    return train, chosen[:, 0], seen


class MF(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, DIM)
        self.item = nn.Embedding(ITEMS, DIM)
        self.bias = nn.Embedding(ITEMS, 1)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)

    def forward(self, user, items):
        return (self.user(user)[:, None] * self.item(items)).sum(-1) + self.bias(items)[..., 0]


def draw_negatives(users, seen, g):
    weight = (~seen[users]).float()
    return torch.multinomial(weight, 1, generator=g)


@torch.no_grad()
def evaluate(model, held_out, seen, rank, world, k=10):
    users = torch.arange(rank, USERS, world)
    scores = model(users, torch.arange(ITEMS).expand(len(users), -1))
    target = held_out[users]
    hide = seen[users].scatter(1, target[:, None], False)
    scores = scores.masked_fill(hide, float("-inf"))
    place = (scores > scores.gather(1, target[:, None])).sum(1)
    hit = (place < k).double()
    sums = torch.stack([hit.sum(), (hit / torch.log2(place.double() + 2)).sum(), torch.tensor(float(len(users)))])
    dist.all_reduce(sums)
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(MF())
    train, held_out, seen = interactions()
    sampler = DistributedSampler(TensorDataset(train), shuffle=True, drop_last=True)
    loader = DataLoader(TensorDataset(train), batch_size=32, sampler=sampler, drop_last=True)
    opt = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-5)
    g = torch.Generator().manual_seed(777 + rank)

    for epoch in range(12):
        sampler.set_epoch(epoch)
        total, count = 0.0, 0
        for (pair,) in loader:
            user, pos = pair[:, 0], pair[:, 1:]
            neg = draw_negatives(user, seen, g)
            score = model(user, torch.cat([pos, neg], dim=1))
            loss = -F.logsigmoid(score[:, 0] - score[:, 1]).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            total, count = total + loss.item(), count + 1
        stats = torch.tensor([total, count])
        dist.all_reduce(stats)
        hr, ndcg = evaluate(model.module, held_out, seen, rank, world)
        if rank == 0:
            print(f"epoch {epoch:2d}  bpr {stats[0] / stats[1]:.4f}  HR@10 {hr:.4f}  NDCG@10 {ndcg:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
