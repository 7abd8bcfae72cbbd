# CTC speech recognition on synthetic features, utterances of different length.
# Character error rate is edits / reference characters over the whole test set.
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

PHONES, FEATS = 12, 16


class Speech(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        voice = torch.randn(PHONES + 1, FEATS, generator=torch.Generator().manual_seed(0))
        self.items = []
        for _ in range(n):
            text = 1 + torch.randint(0, PHONES, (int(torch.randint(2, 9, (1,), generator=g)),), generator=g)
            dur = torch.randint(3, 6, (len(text),), generator=g)
            frames = voice[text].repeat_interleave(dur, 0)
            self.items.append((frames + 0.6 * torch.randn(frames.shape, generator=g), text))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch):
    x, y = zip(*batch)
    return (pad_sequence(x, True), torch.tensor([len(a) for a in x]),
            torch.cat(y), torch.tensor([len(b) for b in y]))


class Recognizer(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.conv = nn.Conv1d(FEATS, d, 3, padding=1)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, PHONES + 1)

    def forward(self, x):
        h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.out(self.rnn(h)[0]).log_softmax(-1)


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, ca in enumerate(a, 1):
        prev, row[0] = row[0], i
        for j, cb in enumerate(b, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (ca != cb))
    return row[-1]


def greedy(logp, length):
    best = logp[:length].argmax(-1).unique_consecutive().tolist()
    return [p for p in best if p]


@torch.no_grad()
def test(net, loader):
    net.eval()
    edits = torch.zeros(2, dtype=torch.float64)
    for x, xl, y, yl in loader:
        logp = net(x)
        for k, ref in enumerate(y.split(yl.tolist())):
            edits += torch.tensor([edit_distance(greedy(logp[k], int(xl[k])), ref.tolist()), len(ref)],
                                  dtype=torch.float64)
    dist.all_reduce(edits)
    return (edits[0] / edits[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch-size", type=int, default=12)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(Recognizer())
    torch.manual_seed(rank + 1)
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    train_set, test_set = Speech(480, 1), Speech(75, 2)
    sampler = DistributedSampler(train_set, world, rank, shuffle=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, collate_fn=collate, drop_last=True)
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)), 16, collate_fn=collate)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs * len(loader))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        run = torch.zeros(2)
        for x, xl, y, yl in loader:
            x = x + 0.2 * torch.randn_like(x)  # noise augmentation
            logp = model(x).transpose(0, 1)
            # every utterance counts the same; all ranks have batch_size utterances
            loss = F.ctc_loss(logp, y, xl, yl, reduction="sum", zero_infinity=True) / len(xl)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            sched.step()
            run += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(run)
        cer = test(model.module, test_loader)
        if rank == 0:
            print(f"epoch {epoch} loss {run[0] / run[1]:.3f} CER {100 * cer:.2f}%", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
