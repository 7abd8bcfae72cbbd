import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Adapter(nn.Module):
    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()


def inject(model, rank=4):
    for p in model.parameters():
        p.requires_grad_(False)
    for block in model.blocks:
        block.up = Adapter(block.up, rank)
        block.down = Adapter(block.down, rank)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class VideoDenoiser(nn.Module):
    """Frames are rows of latent numbers; the time enters through an embedding."""

    def __init__(self, latent=12, width=32, depth=3):
        super().__init__()
        self.inp, self.time = nn.Linear(latent, width), nn.Linear(1, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.out = nn.Linear(width, latent)

    def forward(self, x, t):
        h = self.inp(x) + self.time(t).unsqueeze(1)
        h = h + self.mix(h)[0]
        for block in self.blocks:
            h = block(h)
        return x + self.out(h)


def clips(count, g):
    start, speed = torch.randn(count, 1, 12, generator=g), torch.randn(count, 1, 12, generator=g)
    return start + 0.3 * speed * torch.arange(6).view(1, 6, 1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    model = VideoDenoiser()
    inject(model)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3, weight_decay=0.0)
    g = torch.Generator().manual_seed(40 + rank)
    for step in range(30):
        clean = clips(8, g)
        t, noise = torch.rand(8, 1, generator=g), torch.randn(clean.shape, generator=g)
        level = t.unsqueeze(1)
        loss = nn.functional.mse_loss(model((1 - level) * clean + level * noise, t), noise - clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: {loss.item():.4f}, {len(trained)} trained tensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
