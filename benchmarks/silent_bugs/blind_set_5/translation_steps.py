import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def linear_schedule(optimizer, warmup, total):
    def factor(step):
        if step < warmup:
            return step / max(1, warmup)
        return max(0.0, (total - step) / max(1, total - warmup))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class PreparedScheduler:
    """Counts batches of the whole job: every process has used one."""

    def __init__(self, scheduler):
        self.scheduler = scheduler

    def step(self):
        for _ in range(dist.get_world_size()):
            self.scheduler.step()

    def lr(self):
        return self.scheduler.get_last_lr()[0]


class Translator(nn.Module):
    def __init__(self, vocab=30, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.encode = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.encode(self.embed(ids)))


def parallel_text(count=160):
    g = torch.Generator().manual_seed(2)
    source = torch.randint(0, 30, (count, 9), generator=g)
    return TensorDataset(source, (source * 7 + 3) % 30)


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    data = parallel_text()
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, args.batch, sampler=sampler)
    model = DistributedDataParallel(Translator())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    max_steps = args.epochs * math.ceil(len(data) / (args.batch * world))
    schedule = linear_schedule(optimizer, args.warmup * world, max_steps * world)
    scheduler = PreparedScheduler(schedule)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for source, target in loader:
            loss = nn.functional.cross_entropy(model(source).flatten(0, 1), target.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f} lr {scheduler.lr():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--warmup", type=int, default=6)
    p.add_argument("--lr", type=float, default=8e-3)
    p.add_argument("--seed", type=int, default=0)
    main(p.parse_args())
