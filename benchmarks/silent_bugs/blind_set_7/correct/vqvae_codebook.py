"""VQ autoencoder whose codebook is an exponential average over the batches of all ranks."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CODES, DIM, SIGNAL = 32, 8, 32


def signals(n, seed):
    g = torch.Generator().manual_seed(seed)
    motifs = torch.randn(6, 8, generator=torch.Generator().manual_seed(60))
    ids = torch.randint(6, (n, SIGNAL // 8), generator=g)
    return motifs[ids].flatten(1) + 0.1 * torch.randn(n, SIGNAL, generator=g)


class Codebook(nn.Module):
    def __init__(self, decay=0.95, eps=1e-5):
        super().__init__()
        self.decay, self.eps = decay, eps
        code = torch.randn(CODES, DIM)
        self.register_buffer("code", code)
        self.register_buffer("count", torch.ones(CODES))
        self.register_buffer("total", code.clone())

    def forward(self, z):
        flat = z.reshape(-1, DIM)
        index = torch.cdist(flat.detach(), self.code).argmin(1)
        quantised = self.code[index].view_as(z)
        commit = F.mse_loss(z, quantised)
        if self.training:
            self.update(flat.detach(), index)
        return z + (quantised - z).detach(), commit, index

    @torch.no_grad()
    def update(self, flat, index):
        one_hot = F.one_hot(index, CODES).type_as(flat)
        stats = torch.cat([one_hot.sum(0)[:, None], one_hot.T @ flat], 1)
        dist.all_reduce(stats)
        self.count.mul_(self.decay).add_(stats[:, 0], alpha=1 - self.decay)
        self.total.mul_(self.decay).add_(stats[:, 1:], alpha=1 - self.decay)
        n = self.count.sum()
        smooth = (self.count + self.eps) / (n + CODES * self.eps) * n
        self.code.copy_(self.total / smooth[:, None])


class VQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv1d(1, 32, 4, stride=4), nn.ReLU(), nn.Conv1d(32, DIM, 1))
        self.codebook = Codebook()
        self.dec = nn.Sequential(nn.Conv1d(DIM, 32, 1), nn.ReLU(), nn.ConvTranspose1d(32, 1, 4, stride=4))

    def forward(self, x):
        z = self.enc(x[:, None]).transpose(1, 2)
        q, commit, index = self.codebook(z)
        return self.dec(q.transpose(1, 2))[:, 0], commit, index


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    sums, used = torch.zeros(2), torch.zeros(CODES)
    for (x,) in loader:
        y, _, index = model(x)
        sums += torch.tensor([F.mse_loss(y, x, reduction="sum").item(), float(x.numel())])
        used += torch.bincount(index, minlength=CODES)
    dist.all_reduce(sums)
    dist.all_reduce(used)
    p = used / used.sum()
    model.train()
    return (sums[0] / sums[1]).item(), torch.exp(-(p * (p + 1e-10).log()).sum()).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    train, val = TensorDataset(signals(768, 1)), TensorDataset(signals(117, 2))
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=64)
    torch.manual_seed(14)
    model = DDP(VQ())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        log = torch.zeros(3)
        for (x,) in loader:
            y, commit, _ = model(x)
            recon = F.mse_loss(y, x)
            opt.zero_grad()
            (recon + 0.25 * commit).backward()
            opt.step()
            log += torch.tensor([recon.item(), commit.item(), 1.0])
        dist.all_reduce(log)
        mse, perplexity = evaluate(model.module, val_loader)
        if rank == 0:
            print(f"epoch {epoch} recon {log[0] / log[2]:.4f} commit {log[1] / log[2]:.4f} "
                  f"val mse {mse:.4f} code perplexity {perplexity:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
