"""Toy translation with padded batches: reverse the source sentence.

Sentences have very different lengths, so the loss is normalised by the number
of real (not padded) target tokens.
"""
import argparse
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAD, BOS, EOS, FIRST = 0, 1, 2, 3


class ReverseDataset(Dataset):
    def __init__(self, n, vocab, max_len, seed):
        rng = random.Random(seed)
        self.items = []
        for _ in range(n):
            length = rng.randint(2, max_len)
            self.items.append([rng.randrange(FIRST, vocab) for _ in range(length)])

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        src = self.items[i]
        return torch.tensor(src), torch.tensor([BOS] + src[::-1] + [EOS])


def collate(batch):
    src, tgt = zip(*batch)
    return (
        pad_sequence(src, batch_first=True, padding_value=PAD),
        pad_sequence(tgt, batch_first=True, padding_value=PAD),
    )


class Seq2Seq(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.encoder = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * dim, dim)
        self.decoder = nn.GRU(dim, dim, batch_first=True)
        self.query = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(3 * dim, vocab)

    def forward(self, src, tgt_in):
        memory, _ = self.encoder(self.embed(src))
        keep = (src != PAD).unsqueeze(-1)
        mean = (memory * keep).sum(1) / keep.sum(1)
        h, _ = self.decoder(self.embed(tgt_in), torch.tanh(self.bridge(mean))[None])
        scores = self.query(h) @ memory.transpose(1, 2)
        scores = scores.masked_fill(~keep.transpose(1, 2), float("-inf"))
        context = scores.softmax(-1) @ memory
        return self.out(torch.cat([h, context], -1))


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    dataset = ReverseDataset(args.sentences, args.vocab, args.max_len, args.seed)
    sampler = DistributedSampler(dataset, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, collate_fn=collate)
    model = DDP(Seq2Seq(args.vocab, args.dim))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for src, tgt in loader:
            tgt_in, tgt_out = tgt[:, :-1], tgt[:, 1:]
            logits = model(src, tgt_in)
            loss_sum = F.cross_entropy(
                logits.reshape(-1, args.vocab), tgt_out.reshape(-1), ignore_index=PAD, reduction="sum"
            )
            n_tokens = (tgt_out != PAD).sum()
            dist.all_reduce(n_tokens)
            loss = loss_sum * world / n_tokens
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.stack([loss_sum.detach(), (tgt_out != PAD).sum()])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch + 1}: nll per token {(sums[0] / sums[1]).item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sentences", type=int, default=480)
    parser.add_argument("--vocab", type=int, default=20)
    parser.add_argument("--max-len", type=int, default=12)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args)
    dist.destroy_process_group()
