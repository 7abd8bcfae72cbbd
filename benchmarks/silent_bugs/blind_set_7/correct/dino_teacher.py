"""Self-distillation (DINO style) with an EMA teacher and a running center."""
import copy
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DIM, PROTOS, BATCH, EPOCHS = 32, 24, 32, 8
STUDENT_T, TEACHER_T = 0.1, 0.05


def make_data(n=960):
    g = torch.Generator().manual_seed(14)
    means = 1.5 * torch.randn(8, DIM, generator=g)
    y = torch.randint(0, 8, (n,), generator=g)
    return TensorDataset(means[y] + torch.randn(n, DIM, generator=g))


def view(x):
    return x * (torch.rand_like(x) > 0.15) + 0.2 * torch.randn_like(x)


def network():
    return nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, PROTOS))


class DINOLoss(nn.Module):
    def __init__(self, momentum=0.9):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, PROTOS))
        self.momentum = momentum

    def forward(self, student_out, teacher_out):
        s1, s2 = F.log_softmax(student_out / STUDENT_T, dim=1).chunk(2)
        t1, t2 = F.softmax((teacher_out - self.center) / TEACHER_T, dim=1).chunk(2)
        loss = -0.5 * ((t1 * s2).sum(1).mean() + (t2 * s1).sum(1).mean())
        self.update_center(teacher_out)
        return loss

    @torch.no_grad()
    def update_center(self, teacher_out):
        total = teacher_out.sum(0, keepdim=True)
        dist.all_reduce(total)
        mean = total / (len(teacher_out) * dist.get_world_size())
        self.center.mul_(self.momentum).add_(mean, alpha=1 - self.momentum)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    dataset = make_data()
    sampler = DistributedSampler(dataset, seed=14)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, drop_last=True)

    torch.manual_seed(14)
    student = DistributedDataParallel(network())
    teacher = copy.deepcopy(student.module).requires_grad_(False)
    criterion = DINOLoss()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, weight_decay=0.04)
    total_steps = EPOCHS * len(loader)
    torch.manual_seed(1400 + rank)       # views

    step = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for (x,) in loader:
            views = torch.cat([view(x), view(x)])
            with torch.no_grad():
                teacher_out = teacher(views)
            loss = criterion(student(views), teacher_out)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), 3.0)
            optimizer.step()

            momentum = 1 - 0.02 * (1 + math.cos(math.pi * step / total_steps)) / 2
            with torch.no_grad():
                for pt, ps in zip(teacher.parameters(), student.module.parameters()):
                    pt.mul_(momentum).add_(ps, alpha=1 - momentum)
            step += 1
            probs = F.softmax((teacher_out - criterion.center) / TEACHER_T, dim=1)
            sums += torch.stack([loss.detach(), -(probs * probs.clamp_min(1e-9).log()).sum(1).mean()])
        sums /= len(loader)
        dist.all_reduce(sums)
        sums /= world
        if rank == 0:
            print(f"epoch {epoch}  loss {sums[0]:.4f}  teacher entropy {sums[1]:.4f}  center norm {criterion.center.norm():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
