"""Distil a wide teacher into a small student with soft targets and hints."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CLASSES, DIM = 10, 24


class Classifier(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        layers, d = [], DIM
        for _ in range(depth):
            layers += [nn.Linear(d, width), nn.Tanh()]
            d = width
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.head(self.body(x))


def load_teacher():
    """The teacher's weights come out of a fixed file in the real run."""
    torch.manual_seed(77)
    teacher = Classifier(width=128, depth=3)
    for p in teacher.parameters():
        p.data.mul_(2.0)
        p.requires_grad_(False)
    return teacher.eval()


def make_data(teacher, n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, DIM, generator=g)
    with torch.no_grad():
        y = teacher(x).argmax(1)
    flip = torch.rand(n, generator=g) < 0.1
    y[flip] = torch.randint(CLASSES, (int(flip.sum()),), generator=g)
    return TensorDataset(x, y)


def distill_loss(student, teacher, x, y, alpha=0.7, temperature=2.0):
    with torch.no_grad():
        soft = (teacher(x) / temperature).softmax(-1)
    logits = student(x)
    kd = F.kl_div((logits / temperature).log_softmax(-1), soft, reduction="batchmean") * temperature ** 2
    ce = F.cross_entropy(logits, y)
    return alpha * kd + (1 - alpha) * ce, kd.detach(), ce.detach()


@torch.no_grad()
def evaluate(model, teacher, loader):
    model.eval()
    stats = torch.zeros(3)
    for x, y in loader:
        guess = model(x).argmax(1)
        stats += torch.tensor([float((guess == y).sum()), float((guess == teacher(x).argmax(1)).sum()), float(len(y))])
    dist.all_reduce(stats)
    model.train()
    return (stats[:2] / stats[2]).tolist()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    teacher = load_teacher()
    train, val = make_data(teacher, 1600, 1), make_data(teacher, 301, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=1)
    loader = DataLoader(train, batch_size=40, sampler=sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=100)

    torch.manual_seed(1)
    student = DDP(Classifier(width=32, depth=2))
    opt = torch.optim.AdamW(student.parameters(), lr=3e-3, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=6e-3, total_steps=10 * len(loader))
    for epoch in range(10):
        sampler.set_epoch(epoch)
        log = torch.zeros(3)
        for x, y in loader:
            loss, kd, ce = distill_loss(student, teacher, x, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            log += torch.stack([kd, ce, torch.ones(())])
        dist.all_reduce(log)
        acc, agree = evaluate(student.module, teacher, val_loader)
        if rank == 0:
            print(f"epoch {epoch} kd {log[0] / log[2]:.4f} ce {log[1] / log[2]:.4f} acc {acc:.4f} agreement {agree:.4f}")
    if rank == 0:
        os.makedirs("out_distill", exist_ok=True)
        torch.save(student.module.state_dict(), "out_distill/student.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
