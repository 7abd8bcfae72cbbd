"""Matrix factorisation with the BPR loss and leave-one-out evaluation over all items."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

USERS, ITEMS, PER_USER = 203, 150, 17
TOPK = 10


def make_interactions():
    g = torch.Generator().manual_seed(11)
    u, v = torch.randn(USERS, 6, generator=g), torch.randn(ITEMS, 6, generator=g)
    noise = -torch.log(-torch.log(torch.rand(USERS, ITEMS, generator=g)))
    chosen = (1.5 * u @ v.T + noise).topk(PER_USER, dim=1).indices
    shuffled = torch.stack([row[torch.randperm(PER_USER, generator=g)] for row in chosen])
    return shuffled[:, :-1], shuffled[:, -1]  # history, held-out item


class TrainPairs(Dataset):
    def __init__(self, history):
        self.users = torch.arange(USERS).repeat_interleave(history.shape[1])
        self.items = history.flatten()
        self.seen = torch.zeros(USERS, ITEMS, dtype=torch.bool)
        self.seen[self.users, self.items] = True

    def __len__(self):
        return len(self.users)

    def __getitem__(self, i):
        user = self.users[i]
        while True:
            neg = torch.randint(ITEMS, ())
            if not self.seen[user, neg]:
                return user, self.items[i], neg


class TestUsers(Dataset):
    def __init__(self, held_out):
        self.held_out = held_out

    def __len__(self):
        return len(self.held_out)

    def __getitem__(self, user):
        return user, self.held_out[user]


class BPR(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.user = nn.Embedding(USERS, dim)
        self.item = nn.Embedding(ITEMS, dim)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)

    def forward(self, users, pos, neg):
        u = self.user(users)
        return ((self.item(pos) - self.item(neg)) * u).sum(-1)


@torch.no_grad()
def evaluate(model, loader, seen):
    """HR@10 and NDCG@10 of the held-out item among the items the user has not seen."""
    stats = torch.zeros(3)
    for users, target in loader:
        scores = model.user(users) @ model.item.weight.T
        scores[seen[users]] = float("-inf")
        rank_of_target = (scores > scores.gather(1, target[:, None])).sum(1)
        hit = rank_of_target < TOPK
        gain = 1.0 / torch.log2(rank_of_target.float() + 2.0)
        stats += torch.stack([hit.sum(), (gain * hit).sum(), torch.tensor(float(len(users)))])
    dist.all_reduce(stats)
    return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    history, held_out = make_interactions()
    train, test = TrainPairs(history), TestUsers(held_out)
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=56, sampler=sampler)
    test_loader = DataLoader(Subset(test, range(rank, len(test), world)), batch_size=32)

    torch.manual_seed(5)
    model = DDP(BPR())
    torch.manual_seed(5 + rank)  # negatives
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    best = 0.0
    for epoch in range(8):
        sampler.set_epoch(epoch)
        total = 0.0
        for users, pos, neg in loader:
            loss = -F.logsigmoid(model(users, pos, neg)).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        mean = torch.tensor(total / len(loader))
        dist.all_reduce(mean)
        hr, ndcg = evaluate(model.module, test_loader, train.seen)
        best = max(best, ndcg)
        if rank == 0:
            print(f"epoch {epoch} bpr {mean.item() / world:.4f} HR@{TOPK} {hr:.5f} NDCG@{TOPK} {ndcg:.5f} best {best:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
