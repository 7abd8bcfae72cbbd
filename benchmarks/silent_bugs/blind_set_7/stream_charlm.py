"""Character language model trained from a stream of text blocks."""
import math
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

VOCAB = 32
BLOCK = 33          # 32 inputs + 1 shifted target
MAX_STEPS = 120
BATCH_SIZE = 8      # per process


def make_corpus(n_blocks, seed):
    """Order-1 Markov text, cut into blocks of equal length."""
    trans = torch.softmax(2.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)), -1)
    g = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(n_blocks, BLOCK, dtype=torch.long)
    tokens[:, 0] = torch.randint(0, VOCAB, (n_blocks,), generator=g)
    for t in range(1, BLOCK):
        tokens[:, t] = torch.multinomial(trans[tokens[:, t - 1]], 1, generator=g).squeeze(1)
    return tokens


class TextStream(IterableDataset):
    """Endless stream over the corpus, reshuffled on every pass."""

    def __init__(self, tokens, rank, world_size, seed=0):
        self.tokens = tokens
        self.rank = rank
        self.world_size = world_size
        self.seed = seed

    def __iter__(self):
        epoch = 0
        while True:
            order = list(range(len(self.tokens)))
            random.Random(self.seed + epoch).shuffle(order)
            for idx in order[self.rank::self.world_size]:
                block = self.tokens[idx]
                yield block[:-1], block[1:]
            epoch += 1


class CharGRU(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, x):
        out, _ = self.rnn(self.embed(x))
        return self.head(out)


def lm_loss(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def evaluate(model, tokens, rank, world_size):
    model.eval()
    nll = torch.zeros(2, dtype=torch.float64)
    for block in tokens[rank::world_size].split(16):
        x, y = block[:, :-1], block[:, 1:]
        nll += torch.tensor([lm_loss(model, x, y).item() * y.numel(), y.numel()], dtype=torch.float64)
    dist.all_reduce(nll)
    model.train()
    return math.exp(nll[0] / nll[1])


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)

    stream = TextStream(make_corpus(640, seed=5), rank, world_size, seed=11)
    loader = DataLoader(stream, batch_size=BATCH_SIZE)
    val_tokens = make_corpus(100, seed=6)

    model = DDP(CharGRU())
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)

    logged = torch.zeros(())
    for step, (x, y) in enumerate(loader, start=1):
        loss = lm_loss(model, x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        logged += loss.detach()
        if step % 20 == 0:
            mean_loss = logged / 20
            dist.all_reduce(mean_loss)
            mean_loss /= world_size
            ppl = evaluate(model, val_tokens, rank, world_size)
            if rank == 0:
                seen = step * BATCH_SIZE * world_size
                print(f"step {step:4d}  blocks {seen:5d}  train loss {mean_loss:.4f}  val ppl {ppl:.3f}")
            logged.zero_()
        if step == MAX_STEPS:
            break

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
