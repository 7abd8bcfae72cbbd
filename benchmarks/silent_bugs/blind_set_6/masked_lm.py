"""Masked language model pretraining on documents of different length (DDP, bf16 autocast)."""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

PAD, MASK, VOCAB, MAXLEN = 0, 1, 40, 48
EPOCHS, BATCH, LR, MASK_PROB = 5, 16, 2e-3, 0.2


class Documents(Dataset):
    """Sections of similar documents follow each other: short notes and long reports take turns."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.docs = []
        for i in range(n):
            low, high = (6, 14) if i % 2 else (30, MAXLEN)
            length = int(torch.randint(low, high + 1, (1,), generator=g))
            start, period = torch.randint(0, VOCAB, (2,), generator=g).tolist()
            # long reports repeat their words more regularly than short notes
            period = 2 + period % 3
            words = torch.randint(2, VOCAB, (period,), generator=g)
            ids = words[(start + torch.arange(length)) % period]
            noise = torch.rand(length, generator=g) < (0.3 if i % 2 else 0.05)
            self.docs.append(torch.where(noise, torch.randint(2, VOCAB, (length,), generator=g), ids))

    def __len__(self):
        return len(self.docs)

    def __getitem__(self, i):
        return i, self.docs[i]


def collate_with_masks(fixed):
    """Pads and masks; for validation the mask of a document depends on its number only."""

    def collate(batch):
        ids = torch.full((len(batch), MAXLEN), PAD)
        labels = torch.full((len(batch), MAXLEN), -100)
        for row, (i, doc) in enumerate(batch):
            g = torch.Generator().manual_seed(9000 + i) if fixed else None
            pick = torch.rand(len(doc), generator=g) < MASK_PROB
            pick[int(torch.randint(0, len(doc), (1,), generator=g))] = True
            labels[row, :len(doc)] = torch.where(pick, doc, -100)
            ids[row, :len(doc)] = torch.where(pick, MASK, doc)
        return ids, labels

    return collate


class Encoder(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, d), nn.Embedding(MAXLEN, d)
        layer = nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.0, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, VOCAB)

    def forward(self, ids):
        h = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        return self.head(self.enc(h, src_key_padding_mask=ids == PAD))


@torch.no_grad()
def validate(net, loader, world):
    net.eval()
    total = torch.zeros(3, dtype=torch.float64)
    for ids, labels in loader:
        m = labels != -100
        logits = net(ids)[m]
        total[0] += F.cross_entropy(logits, labels[m], reduction="sum").double()
        total[1] += m.sum()
        total[2] += (logits.argmax(-1) == labels[m]).sum()
    dist.all_reduce(total)
    return (total[0] / total[1]).item(), (total[2] / total[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(Encoder())
    torch.manual_seed(rank)  # random masks
    opt = torch.optim.AdamW(model.parameters(), lr=LR)
    train_set, val_set = Documents(640, seed=1), Documents(120, seed=2)
    sampler = DistributedSampler(train_set, world, rank, shuffle=True)
    loader = DataLoader(train_set, BATCH, sampler=sampler, drop_last=True, collate_fn=collate_with_masks(False))
    mine = Subset(val_set, range(rank, len(val_set), world))
    val_loader = DataLoader(mine, 32, collate_fn=collate_with_masks(True))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        run = torch.zeros(2, dtype=torch.float64)
        for ids, labels in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(ids)
            loss_sum = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
            count = (labels != -100).sum().float()
            run += torch.stack([loss_sum.detach(), count]).double()
            dist.all_reduce(count)
            opt.zero_grad()
            (loss_sum * world / count).backward()
            opt.step()
        dist.all_reduce(run)
        val_loss, val_acc = validate(model.module, val_loader, world)
        if rank == 0:
            print(f"epoch {epoch} train {run[0] / run[1]:.4f} val loss {val_loss:.4f} "
                  f"ppl {math.exp(val_loss):.2f} acc {val_acc:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
