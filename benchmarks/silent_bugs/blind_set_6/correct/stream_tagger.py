"""Sequence tagging from a stream of sentences of different length; the loss is a mean over the tokens of all ranks."""
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

VOCAB, TAGS, PAD = 80, 6, -100


class SentenceStream(IterableDataset):
    """All processes walk through the same shuffled list of sentences, process r keeps every world-th one."""

    def __init__(self, n, seed, rank, world):
        g = torch.Generator().manual_seed(seed)
        tag_of = torch.randint(0, TAGS, (VOCAB,), generator=torch.Generator().manual_seed(1))
        self.sentences = []
        for length in torch.randint(3, 25, (n,), generator=g).tolist():
            words = torch.randint(0, VOCAB, (length,), generator=g)
            tags = (tag_of[words] + (words.roll(1) % 2)) % TAGS
            self.sentences.append((words, tags))
        self.rank, self.world, self.epoch = rank, world, 0

    def __iter__(self):
        order = list(range(len(self.sentences)))
        random.Random(self.epoch).shuffle(order)
        usable = len(order) // self.world * self.world
        for i in order[self.rank:usable:self.world]:
            yield self.sentences[i]


def collate(batch):
    words, tags = zip(*batch)
    return pad_sequence(words, batch_first=True), pad_sequence(tags, batch_first=True, padding_value=PAD)


class Tagger(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.conv = nn.Conv1d(dim, 64, 3, padding=1)
        self.out = nn.Linear(64, TAGS)

    def forward(self, words):
        h = self.conv(self.emb(words).transpose(1, 2)).relu()
        return self.out(h.transpose(1, 2))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    stream = SentenceStream(640, 0, rank, world)
    loader = DataLoader(stream, batch_size=16, collate_fn=collate)
    model = DDP(Tagger())
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.8)

    for epoch in range(5):
        stream.epoch = epoch
        sums = torch.zeros(3)
        for words, tags in loader:
            logits = model(words)
            loss_sum = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=PAD, reduction="sum")
            tokens = (tags != PAD).sum().float()
            all_tokens = tokens.clone()
            dist.all_reduce(all_tokens)
            # DDP takes the mean over the processes
            loss = loss_sum * world / all_tokens
            opt.zero_grad()
            loss.backward()
            opt.step()
            right = ((logits.argmax(-1) == tags) & (tags != PAD)).sum()
            sums += torch.stack([loss_sum.detach(), right.float(), tokens])
        sched.step()
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: loss/token {sums[0] / sums[2]:.4f} acc {sums[1] / sums[2]:.4f} "
                  f"({int(sums[2])} tokens)", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
