"""Topic classification on synthetic headlines, EmbeddingBag + DDP."""
import argparse
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_headlines(n, seed, vocab=200, topics=4, length=12):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, topics, (n,), generator=g)
    noise = torch.randint(0, vocab, (n, length), generator=g)
    topical = y[:, None] * 40 + torch.randint(0, 40, (n, length), generator=g)
    keep = torch.rand(n, length, generator=g) < 0.4
    return TensorDataset(torch.where(keep, topical, noise), y)


class TopicNet(nn.Module):
    def __init__(self, vocab=200, dim=24, topics=4):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.out = nn.Linear(dim, topics)

    def forward(self, x):
        return self.out(self.emb(x))


@torch.no_grad()
def accuracy(model, data, rank, world):
    x, y = data.tensors
    x, y = x[rank::world], y[rank::world]
    model.eval()
    hit = (model(x).argmax(1) == y).sum()
    counts = torch.stack([hit, torch.tensor(len(y))]).double()
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    train, valid = make_headlines(1024, 0), make_headlines(255, 1)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=3)
    loader = DataLoader(train, batch_size=args.batch, sampler=sampler)
    model = DDP(TopicNet())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    crit = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = crit(model(x), y)
            loss.backward()
            opt.step()
        acc = accuracy(model.module, valid, rank, world)
        if rank == 0:
            print(f"epoch {epoch} accuracy {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
