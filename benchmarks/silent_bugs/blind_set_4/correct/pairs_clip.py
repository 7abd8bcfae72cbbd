import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def gather_keep_local(t):
    """All ranks' features; only the local part has a gradient."""
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.detach().contiguous())
    parts[dist.get_rank()] = t
    return torch.cat(parts)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 12))
        self.text = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 12))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.2)))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1), self.logit_scale.exp()


def clip_loss(a, b, scale):
    """The loss of the whole global batch on every rank.

    The local features meet only this rank's part of the gradient, hence the factor
    of the world size against DDP's mean; the scale has the whole gradient already.
    """
    world = dist.get_world_size()
    a, b = gather_keep_local(a), gather_keep_local(b)
    fixed = a @ b.t() * scale.detach()
    learned = (a @ b.t()).detach() * scale
    target = torch.arange(len(a))

    def both(logits):
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2

    loss = both(fixed)
    return loss.detach() + (loss - loss.detach()) * world + both(learned) - both(learned).detach()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    mix = torch.randn(16, 24)
    model = DDP(Towers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(rank + 3)
    for step in range(20):
        text = torch.randn(12, 16, generator=g)
        image = text @ mix + 0.3 * torch.randn(12, 24, generator=g)
        loss = clip_loss(*model(image, text))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.module.logit_scale.clamp_(0, math.log(100))
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1} loss {loss.item():.4f} scale {model.module.logit_scale.exp().item():.2f}")
    dist.destroy_process_group()
