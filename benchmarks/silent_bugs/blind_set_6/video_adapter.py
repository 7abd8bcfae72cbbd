"""Low-rank adapter on a frozen frame predictor, with a scheduler wrapper that keeps the schedule in samples seen."""
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Config:
    steps: int = 80            # optimizer steps, over which the learning rate falls from lr to lr * end_factor
    batch_size: int = 8
    lr: float = 2e-2
    end_factor: float = 0.05
    rank: int = 4
    seed: int = 42


class Clips(Dataset):
    """Moving sine textures: 4 frames in, the next one is the target. One set of clips has a new kind of motion."""

    def __init__(self, n, speed, seed):
        g = torch.Generator().manual_seed(seed)
        x = torch.arange(32.0)
        freq = 0.3 + 0.5 * torch.rand(n, 1, 1, generator=g)
        phase = 6.28 * torch.rand(n, 1, 1, generator=g)
        t = torch.arange(5.0)[None, :, None]
        self.frames = torch.sin(freq * x + phase + speed * t) + 0.05 * torch.randn(n, 5, 32, generator=g)

    def __len__(self):
        return len(self.frames)

    def __getitem__(self, i):
        return self.frames[i, :4].flatten(), self.frames[i, 4]


class LoRALinear(nn.Module):
    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class PreparedScheduler:
    """Steps the wrapped scheduler once for every process, as the batch of a step is that many times larger."""

    def __init__(self, scheduler, num_processes):
        self.scheduler = scheduler
        self.num_processes = num_processes

    def step(self):
        for _ in range(self.num_processes):
            self.scheduler.step()

    def get_last_lr(self):
        return self.scheduler.get_last_lr()


def build_model(cfg):
    g = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
    # a short pretraining on the old kind of motion, the same on all processes
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    frames, target = torch.utils.data.default_collate([s for s in Clips(256, 0.2, seed=9)])
    for _ in range(60):
        idx = torch.randint(0, 256, (64,), generator=g)
        loss = F.mse_loss(net(frames[idx]), target[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    for k in (0, 2, 4):
        net[k] = LoRALinear(net[k], cfg.rank)
    return net


def main():
    cfg = Config()
    dist.init_process_group("gloo")
    process, num_processes = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)

    dataset = Clips(512, 0.9, seed=1)
    sampler = DistributedSampler(dataset, seed=cfg.seed)
    loader = DataLoader(dataset, batch_size=cfg.batch_size, sampler=sampler, drop_last=True)
    model = DDP(build_model(cfg))
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=cfg.lr, weight_decay=0.0)
    scheduler = LinearLR(optimizer, start_factor=1.0, end_factor=cfg.end_factor,
                         total_iters=cfg.steps * num_processes)
    scheduler = PreparedScheduler(scheduler, num_processes)

    step, epoch = 0, 0
    while step < cfg.steps:
        sampler.set_epoch(epoch)
        for frames, target in loader:
            loss = F.mse_loss(model(frames), target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            scheduler.step()
            step += 1
            if step % 10 == 0:
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                if process == 0:
                    print(f"step {step}/{cfg.steps} loss {mean.item() / num_processes:.4f} "
                          f"lr {scheduler.get_last_lr()[0]:.5f}", flush=True)
            if step == cfg.steps:
                break
        epoch += 1

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
