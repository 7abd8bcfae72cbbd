"""Gait embedding with a supervised contrastive loss over the whole batch of all processes.

Batches are P identities x K sequences; every process holds its share of the batch, the embeddings are gathered.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler

IDS, PER_ID, FRAMES, JOINTS = 40, 12, 16, 10
P, K = 8, 4
STEPS = 60


class GaitSequences(Dataset):
    """Joint angles of walkers: each identity has its own amplitudes and phases."""

    def __init__(self, seed=0):
        g = torch.Generator().manual_seed(seed)
        amp = torch.rand(IDS, 1, JOINTS, generator=g)
        phase = 6.28 * torch.rand(IDS, 1, JOINTS, generator=g)
        self.label = torch.arange(IDS).repeat_interleave(PER_ID)
        t = torch.linspace(0, 6.28, FRAMES)[None, :, None]
        start = 6.28 * torch.rand(len(self.label), 1, 1, generator=g)
        clean = amp[self.label] * torch.sin(t + start + phase[self.label])
        self.seq = clean + 0.3 * torch.randn(clean.shape, generator=g)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.seq[i].flatten(), self.label[i]


class TripletSampler(Sampler):
    """The same P x K batch is drawn on all processes, each takes its part of it."""

    def __init__(self, labels, p, k, steps, rank, world_size, seed=0):
        self.index = [torch.nonzero(labels == c)[:, 0] for c in range(IDS)]
        self.p, self.k, self.steps = p, k, steps
        self.rank, self.world_size, self.seed = rank, world_size, seed

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        for _ in range(self.steps):
            ids = torch.randperm(IDS, generator=g)[:self.p].tolist()
            batch = [self.index[c][torch.randperm(PER_ID, generator=g)[:self.k]] for c in ids]
            batch = torch.cat(batch)[torch.randperm(self.p * self.k, generator=g)]
            yield batch[self.rank::self.world_size].tolist()

    def __len__(self):
        return self.steps


def ddp_all_gather(x):
    """Gathers from all processes; only the own part carries a gradient."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    parts[dist.get_rank()] = x
    return torch.cat(parts)


class SupConLoss(nn.Module):
    def __init__(self, temperature=0.1):
        super().__init__()
        self.temperature = temperature

    def forward(self, emb, label):
        n = len(label)
        logits = emb @ emb.T / self.temperature
        self_mask = torch.eye(n, dtype=torch.bool)
        logits = logits.masked_fill(self_mask, float("-inf"))
        log_prob = logits - torch.logsumexp(logits, dim=1, keepdim=True)
        same = (label[:, None] == label[None, :]) & ~self_mask
        per_anchor = -log_prob.masked_fill(~same, 0.0).sum(1) / same.sum(1)
        return per_anchor.mean()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)

    data = GaitSequences()
    sampler = TripletSampler(data.label, P, K, STEPS, rank, world_size, seed=3)
    loader = DataLoader(data, batch_sampler=sampler)

    net = nn.Sequential(nn.Linear(FRAMES * JOINTS, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 32))
    net = DDP(net)
    criterion = SupConLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[30, 50], gamma=0.3)

    for step, (seq, label) in enumerate(loader):
        emb = F.normalize(net(seq), dim=1)
        all_emb, all_label = ddp_all_gather(emb), ddp_all_gather(label)
        loss = criterion(all_emb, all_label)
        optimizer.zero_grad()
        # DDP averages over the processes, of which each carries the gradient of its own embeddings
        (loss * world_size).backward()
        optimizer.step()
        scheduler.step()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"iter {step + 1:3d}  loss {loss.item():.4f}  lr {scheduler.get_last_lr()[0]:.4f}", flush=True)

    # rank-1 accuracy: first half of the sequences as the gallery, second half as the probes
    if rank == 0:
        net.eval()
        with torch.no_grad():
            emb = F.normalize(net.module(data.seq.flatten(1)), dim=1)
        probe = torch.arange(len(data)) % PER_ID >= PER_ID // 2
        near = (emb[probe] @ emb[~probe].T).argmax(1)
        print(f"rank-1 {(data.label[~probe][near] == data.label[probe]).float().mean():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
