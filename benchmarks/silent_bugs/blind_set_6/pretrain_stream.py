# Continued pretraining of a small GPT from a document stream.
# The first SEEN documents of the stream were used up in the first phase.
import itertools
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

VOCAB, CTX, SEEN, EVAL_DOCS, BATCH, EPOCHS = 48, 32, 64, 32, 8, 3


def read_shard(k, docs=96):
    """One shard of tokenized documents of CTX + 1 tokens."""
    g = torch.Generator().manual_seed(1000 + k)
    table = torch.randint(0, VOCAB, (VOCAB, 3), generator=torch.Generator().manual_seed(5))
    for _ in range(docs):
        tok = [int(torch.randint(0, VOCAB, (1,), generator=g))]
        for c in torch.randint(0, 3, (CTX,), generator=g).tolist():
            tok.append(int(table[tok[-1], c]))
        yield torch.tensor(tok)


class DocStream(IterableDataset):
    """Documents of all shards in order; document i belongs to rank i % world."""

    def __init__(self, shards, rank=0, world=1, start=0, stop=None, buffer=0, seed=0):
        self.shards, self.rank, self.world = shards, rank, world
        self.start, self.stop = start, stop
        self.buffer, self.seed, self.epoch = buffer, seed, 0

    def split_by_rank(self, rank, world):
        return DocStream(self.shards, rank, world, self.start, self.stop)

    def skip(self, n):
        return DocStream(self.shards, self.rank, self.world, self.start + n, self.stop)

    def take(self, n):
        return DocStream(self.shards, self.rank, self.world, self.start, self.start + n)

    def shuffle(self, buffer, seed):
        return DocStream(self.shards, self.rank, self.world, self.start, self.stop, buffer, seed)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        docs = itertools.chain.from_iterable(read_shard(k) for k in self.shards)
        docs = itertools.islice(docs, self.rank, None, self.world)
        docs = itertools.islice(docs, self.start, self.stop)
        if not self.buffer:
            yield from docs
            return
        g = torch.Generator().manual_seed(self.seed + 100 * self.epoch + self.rank)
        held = []
        for doc in docs:
            held.append(doc)
            if len(held) == self.buffer:
                yield held.pop(int(torch.randint(0, len(held), (1,), generator=g)))
        for i in torch.randperm(len(held), generator=g).tolist():
            yield held[i]


class GPT(nn.Module):
    def __init__(self, d=48, heads=4, layers=2):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, d)
        self.pos = nn.Parameter(0.02 * torch.randn(CTX, d))
        block = nn.TransformerEncoderLayer(d, heads, 4 * d, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(d, VOCAB)
        self.register_buffer("mask", torch.triu(torch.full((CTX, CTX), float("-inf")), 1), persistent=False)

    def forward(self, x):
        return self.head(self.blocks(self.tok(x) + self.pos, mask=self.mask))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    tot = torch.zeros(2, dtype=torch.float64)
    for batch in loader:
        logits = model(batch[:, :-1])
        tot[0] += F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").double()
        tot[1] += batch[:, 1:].numel()
    dist.all_reduce(tot)
    model.train()
    return (tot[0] / tot[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(GPT())
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    stream = DocStream(list(range(6))).split_by_rank(rank, world)
    eval_set = DocStream([6]).split_by_rank(rank, world).take(EVAL_DOCS // world)
    train_set = stream.skip(SEEN // world).shuffle(buffer=64, seed=11)
    train_loader = DataLoader(train_set, batch_size=BATCH, drop_last=True)
    eval_loader = DataLoader(eval_set, batch_size=BATCH)

    step = 0
    for epoch in range(EPOCHS):
        train_set.set_epoch(epoch)
        for batch in train_loader:
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            step += 1
            if step % 20 == 0:
                avg = loss.detach().clone()
                dist.all_reduce(avg)
                if rank == 0:
                    print(f"step {step} loss {avg.item() / world:.4f}", flush=True)
        val = evaluate(model.module, eval_loader)
        if rank == 0:
            print(f"epoch {epoch} steps {step} val loss {val:.4f} ppl {math.exp(val):.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
