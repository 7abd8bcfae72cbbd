# Sequence-to-sequence transformer on pairs of different length.
# The loss is normalized by all target tokens of the step, label smoothing 0.1.
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PAD, BOS, EOS, VOCAB = 0, 1, 2, 30
EPOCHS, BATCH, LR = 6, 16, 2e-3


class Pairs(Dataset):
    """Target: the source reversed, each token through a fixed dictionary."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        book = 3 + torch.randperm(VOCAB - 3, generator=torch.Generator().manual_seed(0))
        self.pairs = []
        for _ in range(n):
            length = int(torch.randint(2, 13, (1,), generator=g))
            src = torch.randint(3, VOCAB, (length,), generator=g)
            self.pairs.append((src, torch.cat([torch.tensor([BOS]), book[src.flip(0) - 3], torch.tensor([EOS])])))

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        return self.pairs[i]


def collate(batch):
    src, tgt = zip(*batch)
    return pad_sequence(src, True, PAD), pad_sequence(tgt, True, PAD)


class Seq2Seq(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.src_emb, self.tgt_emb, self.pos = nn.Embedding(VOCAB, d), nn.Embedding(VOCAB, d), nn.Embedding(20, d)
        self.tr = nn.Transformer(d, 4, 2, 2, 96, dropout=0.1, batch_first=True, norm_first=True)
        self.out = nn.Linear(d, VOCAB)

    def forward(self, src, tgt):
        pad_s, pad_t = src == PAD, tgt == PAD
        causal = torch.triu(torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool), 1)
        s = self.src_emb(src) + self.pos(torch.arange(src.shape[1]))
        t = self.tgt_emb(tgt) + self.pos(torch.arange(tgt.shape[1]))
        h = self.tr(s, t, tgt_mask=causal, src_key_padding_mask=pad_s, tgt_key_padding_mask=pad_t,
                    memory_key_padding_mask=pad_s)
        return self.out(h)


def evaluate(model, data, rank, world):
    """Sums over this rank's sentences, then over the ranks; no sentence is counted twice."""
    model.eval()
    s = torch.zeros(4, dtype=torch.float64)
    mine = list(range(rank, len(data), world))
    with torch.no_grad():
        for k in range(0, len(mine), 32):
            src, tgt = collate([data[i] for i in mine[k:k + 32]])
            logits, gold = model(src, tgt[:, :-1]), tgt[:, 1:]
            mask = gold != PAD
            right = (logits.argmax(-1) == gold) & mask
            s[0] += F.cross_entropy(logits[mask], gold[mask], reduction="sum").double()
            s[1] += mask.sum()
            s[2] += (right.sum(1) == mask.sum(1)).sum()
            s[3] += len(gold)
    dist.all_reduce(s)
    return (s[0] / s[1]).item(), (s[2] / s[3]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = DDP(Seq2Seq())
    torch.manual_seed(5 + rank)
    opt = torch.optim.Adam(model.parameters(), lr=LR, betas=(0.9, 0.98))
    train_set, dev_set = Pairs(1024, seed=1), Pairs(101, seed=2)
    sampler = DistributedSampler(train_set, world, rank, shuffle=True)
    loader = DataLoader(train_set, BATCH, sampler=sampler, collate_fn=collate, drop_last=True)
    warmup = 40
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min((s + 1) / warmup, (warmup / (s + 1)) ** 0.5))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        run = torch.zeros(2, dtype=torch.float64)
        for src, tgt in loader:
            logits, gold = model(src, tgt[:, :-1]), tgt[:, 1:]
            loss_sum = F.cross_entropy(logits.transpose(1, 2), gold, ignore_index=PAD, label_smoothing=0.1,
                                       reduction="sum")
            count = (gold != PAD).sum().float()
            run += torch.stack([loss_sum.detach(), count]).double()
            dist.all_reduce(count)
            opt.zero_grad()
            (loss_sum * world / count).backward()  # DDP divides by world
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
        dist.all_reduce(run)
        nll, exact = evaluate(model.module, dev_set, rank, world)
        if rank == 0:
            print(f"epoch {epoch} train {run[0] / run[1]:.4f} dev nll {nll:.4f} exact {exact:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
