"""Sequence to sequence on sentences of different length; the loss is a mean over all target tokens."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

VOCAB, BOS, EOS, PAD = 20, 0, 1, -100


class Reversal(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 11, (n,), generator=g).tolist()
        self.src = [torch.randint(2, VOCAB, (k,), generator=g) for k in lengths]

    def __len__(self):
        return len(self.src)

    def __getitem__(self, i):
        s = self.src[i]
        out = torch.cat([s.flip(0), torch.tensor([EOS])])
        return s, torch.cat([torch.tensor([BOS]), out[:-1]]), out


def collate(rows):
    pad = nn.utils.rnn.pad_sequence
    src = [s for s, _, _ in rows]
    return (pad(src, batch_first=True), torch.tensor([len(s) for s in src]),
            pad([d for _, d, _ in rows], batch_first=True),
            pad([t for _, _, t in rows], batch_first=True, padding_value=PAD))


class Seq2Seq(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.enc = nn.GRU(dim, dim, batch_first=True)
        self.dec = nn.GRU(dim, dim, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(2 * dim, VOCAB)

    def forward(self, src, src_len, dec_in):
        packed = nn.utils.rnn.pack_padded_sequence(self.emb(src), src_len, batch_first=True, enforce_sorted=False)
        memory, h = self.enc(packed)
        memory, _ = nn.utils.rnn.pad_packed_sequence(memory, batch_first=True)
        states, _ = self.dec(self.emb(dec_in), h)
        score = states @ memory.transpose(1, 2)
        padding = torch.arange(memory.shape[1])[None] >= src_len[:, None]
        score = score.masked_fill(padding[:, None], float("-inf"))
        context = score.softmax(-1) @ memory
        return self.out(self.drop(torch.cat([states, context], -1)))


def loss_sum(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    sums = torch.zeros(4)  # nll, tokens, correct tokens, sentences all right
    sentences = torch.zeros(1)
    for src, src_len, dec_in, target in loader:
        logits = model(src, src_len, dec_in)
        valid = target != PAD
        right = (logits.argmax(-1) == target) & valid
        sums += torch.stack([loss_sum(logits, target), valid.sum().float(), right.sum().float(),
                             (right.sum(1) == valid.sum(1)).sum().float()])
        sentences += len(src)
    dist.all_reduce(sums)
    dist.all_reduce(sentences)
    model.train()
    return (sums[0] / sums[1]).item(), (sums[2] / sums[1]).item(), (sums[3] / sentences).item()


def main(seed=2, epochs=6):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    train, dev = Reversal(800, 1), Reversal(125, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=seed)
    loader = DataLoader(train, batch_size=20, sampler=sampler, collate_fn=collate)
    dev_loader = DataLoader(Subset(dev, range(rank, len(dev), world)), batch_size=32, collate_fn=collate)
    torch.manual_seed(seed)
    model = DDP(Seq2Seq())
    torch.manual_seed(seed + 100 + rank)
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        log = torch.zeros(2)
        for src, src_len, dec_in, target in loader:
            tokens = (target != PAD).sum().float()
            all_tokens = tokens.clone()
            dist.all_reduce(all_tokens)
            nll = loss_sum(model(src, src_len, dec_in), target)
            # DDP divides by the world size, the token count is that of all ranks
            loss = nll * world / all_tokens
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            log += torch.stack([nll.detach(), tokens])
        dist.all_reduce(log)
        nll, acc, exact = evaluate(model.module, dev_loader)
        if rank == 0:
            print(f"epoch {epoch} train nll {log[0] / log[1]:.4f} dev nll {nll:.4f} token acc {acc:.4f} exact {exact:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
