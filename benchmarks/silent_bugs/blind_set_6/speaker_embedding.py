"""Speaker embeddings: train as a classifier, validate by equal error rate."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

FEATS, FRAMES = 16, 40
TRAIN_SPK, DEV_SPK, UTTS = 40, 24, 10
EPOCHS, BATCH = 8, 16


class Utterances(Dataset):
    def __init__(self, n_spk, seed):
        g = torch.Generator().manual_seed(seed)
        timbre = torch.randn(n_spk, FEATS, generator=g)
        self.spk = torch.arange(n_spk).repeat_interleave(UTTS)
        channel = 0.9 * torch.randn(len(self.spk), FEATS, generator=g)
        noise = 2.0 * torch.randn(len(self.spk), FRAMES, FEATS, generator=g)
        self.feats = timbre[self.spk][:, None] + channel[:, None] + noise

    def __len__(self):
        return len(self.spk)

    def __getitem__(self, i):
        return self.feats[i], self.spk[i]


class XVector(nn.Module):
    def __init__(self, d=32, n_spk=TRAIN_SPK):
        super().__init__()
        self.frame = nn.Sequential(nn.Conv1d(FEATS, 48, 5, padding=2), nn.ReLU(),
                                   nn.Conv1d(48, 48, 3, padding=1), nn.ReLU())
        self.embed = nn.Linear(96, d)
        self.classes = nn.Parameter(torch.randn(n_spk, d))

    def embedding(self, x):
        h = self.frame(x.transpose(1, 2))
        stats = torch.cat([h.mean(2), h.std(2)], 1)
        return F.normalize(self.embed(stats), dim=1)

    def forward(self, x, y):
        cos = self.embedding(x) @ F.normalize(self.classes, dim=1).t()
        cos = cos - 0.2 * F.one_hot(y, cos.shape[1])
        return F.cross_entropy(15 * cos, y), (cos.argmax(1) == y).sum()


def equal_error_rate(emb, spk):
    """EER over all pairs of utterances."""
    i, j = torch.triu_indices(len(emb), len(emb), 1)
    score = (emb[i] * emb[j]).sum(1)
    target = spk[i] == spk[j]
    order = score.argsort()
    miss = target[order].double().cumsum(0) / target.sum()
    fa = 1 - (~target[order]).double().cumsum(0) / (~target).sum()
    k = (miss - fa).abs().argmin()
    return ((miss[k] + fa[k]) / 2).item(), len(score)


def gather(x, world):
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


@torch.no_grad()
def validate(net, dev_set, rank, world):
    net.eval()
    loader = DataLoader(Subset(dev_set, range(rank, len(dev_set), world)), batch_size=32)
    emb, spk = [], []
    for x, y in loader:
        emb.append(net.embedding(x))
        spk.append(y)
    emb, spk = torch.cat(emb), torch.cat(spk)
    emb, spk = gather(emb, world), gather(spk, world)
    return equal_error_rate(emb, spk)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = DDP(XVector())
    torch.manual_seed(3 + rank)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train_set, dev_set = Utterances(TRAIN_SPK, seed=1), Utterances(DEV_SPK, seed=2)
    assert len(dev_set) % world == 0
    sampler = DistributedSampler(train_set, world, rank)
    loader = DataLoader(train_set, BATCH, sampler=sampler, drop_last=True)

    best = 1.0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        stat = torch.zeros(3)
        for x, y in loader:
            x = x + 0.3 * torch.randn_like(x)  # noise augmentation
            loss, right = model(x, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            stat += torch.tensor([loss.item() * len(y), right.item(), len(y)])
        dist.all_reduce(stat)
        eer, trials = validate(model.module, dev_set, rank, world)
        if eer < best:
            best, best_epoch = eer, epoch
        if rank == 0:
            print(f"epoch {epoch} loss {stat[0] / stat[2]:.4f} acc {stat[1] / stat[2]:.3f} "
                  f"dev EER {100 * eer:.2f}% ({trials} trials)", flush=True)
    if rank == 0:
        print(f"best EER {100 * best:.2f}% in epoch {best_epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
