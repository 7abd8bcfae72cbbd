"""Sequences of different length, gradient accumulation, loss per token over the whole global batch."""
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

VOCAB, IGNORE = 20, -100
BATCH, ACCUM, EPOCHS = 8, 3, 5


def make_sentences(n, seed):
    """Each label is the running sum of the last two tokens."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(n):
        length = int(torch.randint(4, 30, (), generator=g))
        ids = torch.randint(1, VOCAB, (length,), generator=g)
        prev = torch.cat([torch.zeros(1, dtype=torch.long), ids[:-1]])
        out.append((ids, (ids + prev) % VOCAB))
    return out


def collate(batch):
    ids, labels = zip(*batch)
    return pad_sequence(ids, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=IGNORE)


class Tagger(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        return self.out(self.rnn(self.embed(ids))[0])


def nll_sum(model, ids, labels):
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def windows(loader, size):
    chunk = []
    for batch in loader:
        chunk.append(batch)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


@torch.no_grad()
def evaluate(model, sentences, rank, world):
    model.eval()
    part = sentences[rank::world]
    sums = torch.zeros(3, dtype=torch.float64)
    for i in range(0, len(part), 16):
        ids, labels = collate(part[i:i + 16])
        logits, real = model(ids), labels != IGNORE
        sums[0] += F.cross_entropy(logits[real], labels[real], reduction="sum")
        sums[1] += (logits.argmax(-1)[real] == labels[real]).sum()
        sums[2] += real.sum()
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    train, val = make_sentences(640, seed=1), make_sentences(101, seed=2)
    sampler = DistributedSampler(train, seed=4)
    loader = DataLoader(train, batch_size=BATCH, sampler=sampler, collate_fn=collate)
    model = DDP(Tagger())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        epoch_sums = torch.zeros(2, dtype=torch.float64)
        for micro_batches in windows(loader, ACCUM):
            tokens = torch.tensor(float(sum((labels != IGNORE).sum() for _, labels in micro_batches)))
            dist.all_reduce(tokens)
            for i, (ids, labels) in enumerate(micro_batches):
                last = i == len(micro_batches) - 1
                with nullcontext() if last else model.no_sync():
                    nll = nll_sum(model, ids, labels)
                    # DDP divides by the number of processes
                    (nll * world / tokens).backward()
                epoch_sums += torch.tensor([nll.item(), (labels != IGNORE).sum().item()], dtype=torch.float64)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(epoch_sums)
        val_loss, val_acc = evaluate(model, val, rank, world)
        if rank == 0:
            print(f"epoch {epoch}  train {epoch_sums[0] / epoch_sums[1]:.4f}  val {val_loss:.4f}  acc {val_acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
