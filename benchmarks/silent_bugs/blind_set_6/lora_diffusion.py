# LoRA fine-tuning of a small diffusion model, cosine learning rate with warmup.
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--train-batch-size", type=int, default=16)
parser.add_argument("--num-train-epochs", type=int, default=6)
parser.add_argument("--learning-rate", type=float, default=4e-3)
parser.add_argument("--lr-warmup-steps", type=int, default=10)
parser.add_argument("--rank", type=int, default=8)
DIM, T = 24, 100
ALPHA_BAR = torch.cumprod(1 - torch.linspace(1e-3, 0.08, T), 0)


def make_style(n, seed):
    """Short 'images' of a new style: two coupled waves."""
    g = torch.Generator().manual_seed(seed)
    pos = torch.arange(DIM) / DIM
    a, b = torch.rand(2, n, 1, generator=g)
    x = (6.2832 * (pos + a)).sin() * (1 + b) + 0.5 * (12.566 * (pos + a)).cos()
    return x + 0.05 * torch.randn(n, DIM, generator=g)


class LoRALinear(nn.Module):
    def __init__(self, base, r, scale=2.0):
        super().__init__()
        self.base, self.scale = base, scale
        self.base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, r, bias=False)
        self.up = nn.Linear(r, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.scale * self.up(self.down(x))


class Denoiser(nn.Module):
    def __init__(self, d=96):
        super().__init__()
        self.inp, self.time = nn.Linear(DIM, d), nn.Embedding(T, d)
        self.mid1, self.mid2, self.out = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, DIM)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.time(t))
        h = h + F.silu(self.mid1(h))
        h = h + F.silu(self.mid2(h))
        return self.out(h)


def add_noise(x, noise, t):
    a = ALPHA_BAR[t][:, None]
    return a.sqrt() * x + (1 - a).sqrt() * noise


def pretrained_denoiser():
    """Stands for the downloaded base model: a short training on plain sine waves."""
    torch.manual_seed(0)
    net = Denoiser()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    pos = torch.arange(DIM) / DIM
    for _ in range(200):
        x = (6.2832 * (pos + torch.rand(64, 1))).sin()
        noise, t = torch.randn_like(x), torch.randint(0, T, (64,))
        opt.zero_grad()
        F.mse_loss(net(add_noise(x, noise, t), t), noise).backward()
        opt.step()
    return net.requires_grad_(False)


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    net = pretrained_denoiser()
    for name in ("inp", "mid1", "mid2", "out"):
        setattr(net, name, LoRALinear(getattr(net, name), args.rank))
    model = DDP(net)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=args.learning_rate)

    dataset = TensorDataset(make_style(640, seed=1))
    sampler = DistributedSampler(dataset, world, rank, shuffle=True)
    loader = DataLoader(dataset, args.train_batch_size, sampler=sampler, drop_last=True)

    steps_per_epoch = len(loader)
    max_train_steps = args.num_train_epochs * steps_per_epoch

    def lr_lambda(step):
        if step < args.lr_warmup_steps:
            return (step + 1) / args.lr_warmup_steps
        done = (step - args.lr_warmup_steps) / max(1, max_train_steps - args.lr_warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    scheduler = LambdaLR(optimizer, lr_lambda)
    val = make_style(128, seed=2)
    vg = torch.Generator().manual_seed(5)
    val_noise, val_t = torch.randn(128, DIM, generator=vg), torch.randint(0, T, (128,), generator=vg)
    torch.manual_seed(31 + rank)  # other noise and time steps on every rank

    step = 0
    for epoch in range(args.num_train_epochs):
        sampler.set_epoch(epoch)
        model.train()
        run = torch.zeros(2)
        for (x,) in loader:
            noise, t = torch.randn_like(x), torch.randint(0, T, (len(x),))
            loss = F.mse_loss(model(add_noise(x, noise, t), t), noise)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            scheduler.step()
            step += 1
            run += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(run)
        model.eval()
        with torch.no_grad():
            s = slice(rank, None, world)
            err = (net(add_noise(val[s], val_noise[s], val_t[s]), val_t[s]) - val_noise[s]).pow(2)
            tot = torch.tensor([err.sum(), float(err.numel())])
        dist.all_reduce(tot)
        if rank == 0:
            print(f"epoch {epoch} step {step} lr {scheduler.get_last_lr()[0]:.2e} "
                  f"loss {run[0] / run[1]:.4f} val {tot[0] / tot[1]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
