import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Codebook(nn.Module):
    """Nearest-code quantizer with moving averages; codes that fall out of use are replaced."""

    def __init__(self, codes, dim, decay=0.9, least=0.3):
        super().__init__()
        self.decay, self.least = decay, least
        self.register_buffer("embed", torch.randn(codes, dim))
        self.register_buffer("total", self.embed.clone())
        self.register_buffer("uses", torch.ones(codes))

    def forward(self, z):
        rows = z.flatten(0, -2)
        index = torch.cdist(rows, self.embed).argmin(1)
        code = self.embed[index].view_as(z)
        if self.training:
            self.learn(rows.detach(), index)
        commit = (z - code).pow(2).mean()
        return z + (code - z).detach(), commit

    @torch.no_grad()
    def learn(self, rows, index):
        chosen = nn.functional.one_hot(index, len(self.embed)).float()
        uses, total = chosen.sum(0), chosen.t() @ rows
        dist.all_reduce(uses)
        dist.all_reduce(total)
        self.uses.lerp_(uses, 1 - self.decay)
        self.total.lerp_(total, 1 - self.decay)
        self.embed.copy_(self.total / self.uses.clamp(min=1e-3).unsqueeze(1))
        dead = self.uses < self.least
        if dead.any():
            fresh = rows[torch.randint(0, len(rows), (int(dead.sum()),))]
            dist.broadcast(fresh, 0)
            self.embed[dead] = fresh
            self.total[dead] = fresh
            self.uses[dead] = 1.0


class Codec(nn.Module):
    def __init__(self, hop=8, dim=6, codes=48):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(hop, 32), nn.ELU(), nn.Linear(32, dim))
        self.codebook = Codebook(codes, dim)
        self.decode = nn.Sequential(nn.Linear(dim, 32), nn.ELU(), nn.Linear(32, hop))

    def forward(self, frames):
        code, commit = self.codebook(self.encode(frames))
        return self.decode(code), commit


def sounds(count, g):
    t = torch.arange(64) / 64
    pitch = torch.randint(1, 9, (count, 1), generator=g)
    return ((6.283 * pitch * t).sin() * torch.rand(count, 1, generator=g)).view(count, 8, 8)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(Codec(), forward_sync_buffers=False)
    for buffer in model.module.buffers():
        dist.broadcast(buffer, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(70 + rank)
    for step in range(60):
        frames = sounds(8, g)
        guess, commit = model(frames)
        loss = nn.functional.l1_loss(guess, frames) + 0.25 * commit
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 15 == 14:
            used = int((model.module.codebook.uses > 0.5).sum())
            print(f"step {step + 1}: loss {loss.item():.4f}, {used} codes in use")
    dist.destroy_process_group()
