import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def average_precision(scores, labels):
    labels = labels[scores.argsort(descending=True)]
    precision = labels.cumsum(0) / torch.arange(1, len(labels) + 1)
    return (precision * labels).sum() / labels.sum().clamp(min=1)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    scores, labels = [], []
    for x, y in loader:
        scores.append(model.module(x).squeeze(1))
        labels.append(y)
    scores, labels = torch.cat(scores), torch.cat(labels)
    world = dist.get_world_size()
    pools = [[torch.empty_like(t) for _ in range(world)] for t in (scores, labels)]
    dist.all_gather(pools[0], scores)
    dist.all_gather(pools[1], labels)
    ap = average_precision(torch.cat(pools[0]), torch.cat(pools[1]))
    dist.all_reduce(ap)
    model.train()
    return (ap / world).item()


def make_data():
    g = torch.Generator().manual_seed(4)
    x = torch.randn(320, 8, generator=g)
    score = x[:, 0] + x[:, 1] * x[:, 2] + 0.7 * torch.randn(320, generator=g)
    return TensorDataset(x, (score > 1.6).float())


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
data = make_data()
train, val = Subset(data, range(256)), Subset(data, range(256, 320))
train_sampler = DistributedSampler(train, seed=9)
train_loader = DataLoader(train, 32, sampler=train_sampler)
val_loader = DataLoader(val, 16, sampler=DistributedSampler(val, shuffle=False))
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(4):
    train_sampler.set_epoch(epoch)
    for x, y in train_loader:
        loss = F.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ap = evaluate(model, val_loader)
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}  AP {ap:.4f}")
dist.destroy_process_group()
