"""Sequence tagging with dynamic padding and gradient accumulation.

The loss of an update is the mean over all tokens of all micro batches of all
ranks, whatever their lengths.
"""
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

VOCAB, TAGS, IGNORE = 40, 5, -100
MICRO, GLOBAL = 8, 32
UPDATES = 24


def corpus(n=512):
    rng = random.Random(13)
    tag_of = [rng.randrange(TAGS) for _ in range(VOCAB)]
    data = []
    for _ in range(n):
        words = [rng.randrange(1, VOCAB) for _ in range(rng.choice([3, 4, 5, 20, 30]))]
        tags = [(tag_of[w] + (i > 0 and words[i - 1] % 2)) % TAGS for i, w in enumerate(words)]
        data.append((torch.tensor(words), torch.tensor(tags)))
    return data


def pad(examples):
    words, tags = zip(*examples)
    lengths = torch.tensor([len(w) for w in words])
    return pad_sequence(words, True), pad_sequence(tags, True, IGNORE), lengths


class Tagger(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.lstm = nn.LSTM(dim, dim, bidirectional=True, batch_first=True)
        self.out = nn.Linear(2 * dim, TAGS)

    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.embed(words), lengths, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.out(h)


def micro_batches(data, update, rank, world):
    rng = random.Random(update)
    chosen = rng.sample(range(len(data)), GLOBAL)[rank::world]
    return [pad([data[i] for i in chosen[k : k + MICRO]]) for k in range(0, len(chosen), MICRO)]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = corpus()
    model = DDP(Tagger())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    for update in range(1, UPDATES + 1):
        micros = micro_batches(data, update, rank, world)
        tokens = torch.tensor(sum(int(lengths.sum()) for _, _, lengths in micros))
        dist.all_reduce(tokens)
        scale = world / tokens.item()  # the wrapper averages over ranks

        optimizer.zero_grad()
        nll = torch.zeros(())
        for k, (words, tags, lengths) in enumerate(micros):
            model.require_backward_grad_sync = k == len(micros) - 1
            logits = model(words, lengths)
            loss = F.cross_entropy(logits.transpose(1, 2), tags, ignore_index=IGNORE, reduction="sum")
            (loss * scale).backward()
            nll += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        dist.all_reduce(nll)
        if rank == 0 and update % 6 == 0:
            print(f"update {update}: nll/token {nll.item() / tokens.item():.5f} grad norm {norm.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
