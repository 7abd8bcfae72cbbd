"""Small CTC recogniser on synthetic utterances, batches bucketed by length."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

VOCAB = 12  # 0 is the blank
FEAT = 16


class Utterances(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        units = torch.randn(VOCAB, FEAT, generator=torch.Generator().manual_seed(99))
        self.items = []
        for _ in range(n):
            length = int(torch.randint(2, 9, (1,), generator=g))
            tokens = torch.randint(1, VOCAB, (length,), generator=g)
            frames = torch.randint(2, 5, (length,), generator=g)
            feats = units[tokens].repeat_interleave(frames, dim=0)
            gap = torch.zeros(len(feats) // 4 + 1, FEAT)
            feats = torch.cat([gap, feats, gap])
            self.items.append((feats + 0.3 * torch.randn(feats.shape, generator=g), tokens))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class BucketBatchSampler:
    """Utterances of similar length share a batch; every rank takes its part of the batches."""

    def __init__(self, lengths, batch_size, num_buckets, rank, world, seed=1337):
        order = sorted(range(len(lengths)), key=lambda i: lengths[i])
        size = len(order) // num_buckets
        self.buckets = [order[i * size:(i + 1) * size] for i in range(num_buckets)]
        self.batch_size, self.rank, self.world = batch_size, rank, world
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return sum(len(b) // self.batch_size for b in self.buckets) // self.world

    def __iter__(self):
        g = torch.Generator()
        g.manual_seed(self.seed + self.epoch)
        batches = []
        for bucket in self.buckets:
            perm = torch.randperm(len(bucket), generator=g).tolist()
            for i in range(0, len(perm), self.batch_size):
                batches.append([bucket[j] for j in perm[i:i + self.batch_size]])
        order = torch.randperm(len(batches), generator=g).tolist()
        return iter([batches[i] for i in order[self.rank::self.world]])


def collate(items):
    feats = nn.utils.rnn.pad_sequence([f for f, _ in items], batch_first=True)
    tokens = torch.cat([t for _, t in items])
    return feats, torch.tensor([len(f) for f, _ in items]), tokens, torch.tensor([len(t) for _, t in items])


class Recogniser(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.inp = nn.Linear(FEAT, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(hidden, VOCAB)

    def forward(self, x):
        h, _ = self.rnn(torch.relu(self.inp(x)))
        return self.out(self.drop(h)).log_softmax(-1)


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        prev, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (x != y))
    return row[-1]


@torch.no_grad()
def token_error_rate(model, data, rank, world):
    model.eval()
    counts = torch.zeros(2)
    for i in range(rank, len(data), world):
        feats, ref = data[i]
        path = model(feats[None])[0].argmax(-1).unique_consecutive().tolist()
        counts[0] += edit_distance([p for p in path if p != 0], ref.tolist())
        counts[1] += len(ref)
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    train, dev = Utterances(640, seed=1), Utterances(101, seed=2)
    sampler = BucketBatchSampler([len(f) for f, _ in train.items], 8, 8, rank, world)
    loader = DataLoader(train, batch_sampler=sampler, collate_fn=collate)
    model = DDP(Recogniser())
    torch.manual_seed(7 + rank)  # dropout
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for feats, feat_len, tokens, token_len in loader:
            logp = model(feats).transpose(0, 1)
            loss = F.ctc_loss(logp, tokens, feat_len, token_len, zero_infinity=True)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        ter = token_error_rate(model.module, dev, rank, world)
        if rank == 0:
            print(f"epoch {epoch} ctc loss {total[0] / total[1]:.4f} dev TER {ter:.4f}")
    if rank == 0:
        os.makedirs("out_asr", exist_ok=True)
        torch.save(model.module.state_dict(), "out_asr/recogniser.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
