# Flow matching on 2-d toy data with FSDP2 and gradient clipping.
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS, BATCH, LR, MAX_NORM = 5, 32, 0.1, 0.5


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    r = torch.rand(n, generator=g).sqrt()
    arm = torch.randint(0, 2, (n,), generator=g)
    a = 3 * math.pi * r + math.pi * arm
    x = torch.stack([r * a.cos(), r * a.sin()], 1)
    return 2 * x + 0.03 * torch.randn(n, 2, generator=g), arm


class ResBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.fc2(F.silu(self.fc1(self.norm(x))))


class VelocityNet(nn.Module):
    def __init__(self, d=64, depth=3):
        super().__init__()
        self.inp = nn.Linear(2 + 8, d)
        self.cls = nn.Embedding(2, d)
        self.blocks = nn.ModuleList(ResBlock(d) for _ in range(depth))
        self.out = nn.Linear(d, 2)

    def forward(self, x, t, c):
        freq = 2.0 ** torch.arange(4)
        emb = torch.cat([(t[:, None] * freq).sin(), (t[:, None] * freq).cos()], 1)
        h = self.inp(torch.cat([x, emb], 1)) + self.cls(c)
        for b in self.blocks:
            h = b(h)
        return self.out(h)


def flow_loss(model, x1, c, noise, t):
    xt = (1 - t[:, None]) * noise + t[:, None] * x1
    return F.mse_loss(model(xt, t, c), x1 - noise)


def clip_gradients(model, max_norm):
    """Clip by the norm of all gradients; every rank holds its shards of them."""
    grads = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    total = torch.stack([g.pow(2).sum() for g in grads]).sum()
    dist.all_reduce(total)
    norm = total.sqrt()
    coef = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(coef)
    return norm


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = VelocityNet()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)

    # noise and time steps differ between the ranks
    rng = torch.Generator().manual_seed(1234 + rank)
    train_set = TensorDataset(*spirals(1024, seed=1))
    sampler = DistributedSampler(train_set, world, rank, shuffle=True)
    loader = DataLoader(train_set, BATCH, sampler=sampler, drop_last=True)
    # fixed noise for validation, the same for any number of ranks
    vx, vc = spirals(256, seed=2)
    vg = torch.Generator().manual_seed(99)
    vn, vt = torch.randn(256, 2, generator=vg), torch.rand(256, generator=vg)

    step = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for x1, c in loader:
            noise = torch.randn(x1.shape, generator=rng)
            t = torch.rand(len(x1), generator=rng)
            loss = flow_loss(model, x1, c, noise, t)
            opt.zero_grad()
            loss.backward()
            grad_norm = clip_gradients(model, MAX_NORM)
            opt.step()
            step += 1
            if step % 10 == 0:
                avg = loss.detach().clone()
                dist.all_reduce(avg)
                if rank == 0:
                    print(f"step {step} loss {avg.item() / world:.4f} grad_norm {grad_norm.item():.4f}", flush=True)
        model.eval()
        with torch.no_grad():
            s = slice(rank, None, world)
            n = len(vx[s])
            tot = torch.tensor([flow_loss(model, vx[s], vc[s], vn[s], vt[s]).item() * n, n])
        dist.all_reduce(tot)
        if rank == 0:
            print(f"epoch {epoch} val loss {tot[0] / tot[1]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
