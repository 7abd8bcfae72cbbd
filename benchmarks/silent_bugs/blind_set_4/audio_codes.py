import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Codebook(nn.Module):
    def __init__(self, size=16, dim=8, decay=0.8):
        super().__init__()
        self.decay = decay
        embed = torch.randn(size, dim)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.ones(size))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        codes = torch.cdist(flat.detach(), self.embed).argmin(1)
        quant = F.embedding(codes, self.embed).view_as(x)
        if self.training:
            self.update(flat.detach(), codes)
        commit = F.mse_loss(x, quant.detach())
        return x + (quant - x).detach(), commit, codes

    @torch.no_grad()
    def update(self, flat, codes):
        onehot = F.one_hot(codes, len(self.embed)).to(flat.dtype)
        counts, sums = onehot.sum(0), onehot.t() @ flat
        dist.all_reduce(counts)
        dist.all_reduce(sums)
        self.cluster_size.mul_(self.decay).add_(counts, alpha=1 - self.decay)
        self.embed_avg.mul_(self.decay).add_(sums, alpha=1 - self.decay)
        n = self.cluster_size.sum()
        smoothed = (self.cluster_size + 1e-5) / (n + len(self.embed) * 1e-5) * n
        self.embed.copy_(self.embed_avg / smoothed.unsqueeze(1))


class Codec(nn.Module):
    def __init__(self, frame=20, dim=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(frame, 32), nn.ELU(), nn.Linear(32, dim))
        self.codebook = Codebook(dim=dim)
        self.decoder = nn.Sequential(nn.Linear(dim, 32), nn.ELU(), nn.Linear(32, frame))

    def forward(self, frames):
        z, commit, codes = self.codebook(self.encoder(frames))
        return self.decoder(z), commit, codes


def frames(generator, n, rank):
    t = torch.arange(20) / 20
    pitch = 1 + 2 * torch.rand(n, 4, 1, generator=generator) + 2 * rank
    return torch.sin(6.28 * pitch * t)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    codec = DistributedDataParallel(Codec())
    optimizer = torch.optim.Adam(codec.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(60 + rank)
    for step in range(24):
        wave = frames(generator, 8, rank)
        recon, commit, codes = codec(wave)
        loss = F.mse_loss(recon, wave) + 0.25 * commit
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 6 == 5:
            print(f"step {step + 1} loss {loss.item():.4f} codes in use {len(codes.unique())}")
    dist.destroy_process_group()
