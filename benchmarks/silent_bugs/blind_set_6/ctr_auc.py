"""Click-through model (embedding tables, dense features, pairwise interactions) with AUROC on the last days."""
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

TABLES = [50, 200, 30, 10]
DENSE = 6
DIM = 8


class ClickLog(Dataset):
    """Rows are in the order of time. The click rate moves from day to day."""

    def __init__(self, n, days, seed):
        rng = np.random.default_rng(seed)
        truth = np.random.default_rng(99)
        weights = [truth.normal(0, 0.7, size=t) for t in TABLES]
        dense_w = truth.normal(0, 0.5, size=DENSE)
        self.sparse = np.stack([rng.integers(0, t, size=n) for t in TABLES], axis=1)
        self.dense = rng.normal(size=(n, DENSE)).astype(np.float32)
        day = np.arange(n) * days // n
        base = np.linspace(-2.5, 1.5, days)[day]
        self.dense[:, 0] += base
        logit = base + sum(w[self.sparse[:, k]] for k, w in enumerate(weights)) + self.dense @ dense_w
        self.click = (rng.random(n) < 1 / (1 + np.exp(-logit))).astype(np.float32)

    def __len__(self):
        return len(self.click)

    def __getitem__(self, i):
        return self.sparse[i], self.dense[i], self.click[i]


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(t, DIM) for t in TABLES)
        self.bottom = nn.Sequential(nn.Linear(DENSE, 32), nn.ReLU(), nn.Linear(32, DIM), nn.ReLU())
        pairs = (len(TABLES) + 1) * len(TABLES) // 2
        self.top = nn.Sequential(nn.Linear(DIM + pairs, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("tri", torch.tril_indices(len(TABLES) + 1, len(TABLES) + 1, -1), persistent=False)

    def forward(self, sparse, dense):
        d = self.bottom(dense)
        feats = torch.stack([d] + [t(sparse[:, k]) for k, t in enumerate(self.tables)], dim=1)
        inter = feats @ feats.transpose(1, 2)
        return self.top(torch.cat([d, inter[:, self.tri[0], self.tri[1]]], dim=1))[:, 0]


def auroc(score, label):
    """Area under the ROC curve by ranks."""
    order = torch.argsort(score)
    rank_of = torch.empty(len(score), dtype=torch.float64)
    rank_of[order] = torch.arange(1, len(score) + 1, dtype=torch.float64)
    pos = label > 0.5
    n_pos, n_neg = pos.sum(), (~pos).sum()
    return (rank_of[pos].sum() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg)


def gather_all(x):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x)
    return torch.cat(parts)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    scores, labels = [], []
    for sparse, dense, click in loader:
        scores.append(model.module(sparse, dense).sigmoid())
        labels.append(click)
    scores, labels = gather_all(torch.cat(scores)), gather_all(torch.cat(labels))
    auc = auroc(scores, labels)
    model.train()
    return auc.item(), len(labels)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    train_set = ClickLog(1920, days=6, seed=1)
    val_set = ClickLog(601, days=2, seed=2)
    sampler = DistributedSampler(train_set, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=32, sampler=sampler, drop_last=True)
    # each process evaluates its stretch of the validation days, nothing twice
    part = np.array_split(np.arange(len(val_set)), world)[rank]
    val_loader = DataLoader(Subset(val_set, part.tolist()), batch_size=128)

    model = DDP(DLRM())
    opt = torch.optim.Adagrad(model.parameters(), lr=0.03)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        seen = torch.zeros(2)
        for sparse, dense, click in train_loader:
            loss = F.binary_cross_entropy_with_logits(model(sparse, dense), click)
            opt.zero_grad()
            loss.backward()
            opt.step()
            seen += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(seen)
        auc, rows = evaluate(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: logloss {seen[0] / seen[1]:.4f} AUROC over val set: {auc:.4f} ({rows} rows)",
                  flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
