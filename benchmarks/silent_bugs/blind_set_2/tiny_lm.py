import os
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset, DataLoader, DistributedSampler

PAD = 0


class Sentences(Dataset):
    """Variable length arithmetic progressions modulo the vocabulary."""

    def __init__(self, n=256, vocab=30, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            length = int(torch.randint(4, 28, (1,), generator=g))
            start, step = torch.randint(0, vocab - 1, (2,), generator=g).tolist()
            self.rows.append(torch.tensor([1 + (start + step * k) % (vocab - 1) for k in range(length)]))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


class LM(nn.Module):
    def __init__(self, vocab=30, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


class Trainer:
    def __init__(self, batch=16, lr=0.3):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(5)
        data = Sentences()
        self.sampler = DistributedSampler(data, shuffle=True)
        self.loader = DataLoader(data, batch // self.world, sampler=self.sampler, collate_fn=collate)
        self.model = DDP(LM())
        self.opt = torch.optim.SGD(self.model.parameters(), lr=lr)

    def step(self, seq):
        inp, tgt = seq[:, :-1], seq[:, 1:]
        logits = self.model(inp)
        nll = F.cross_entropy(logits.flatten(0, 1), tgt.flatten(), ignore_index=PAD, reduction="sum")
        tokens = (tgt != PAD).sum()
        total = tokens.clone()
        dist.all_reduce(total)
        loss = nll * self.world / total
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return torch.stack([nll.detach(), tokens.float()])

    def fit(self, epochs):
        for e in range(epochs):
            self.sampler.set_epoch(e)
            tally = sum(self.step(seq) for seq in self.loader)
            dist.all_reduce(tally)
            if self.rank == 0:
                print(f"epoch {e}: nll/token {tally[0] / tally[1]:.5f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(lr=float(os.environ.get("LR", 0.3))).fit(3)
    dist.destroy_process_group()
