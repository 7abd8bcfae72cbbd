"""Distillation: a frozen teacher in eval mode, a student under DDP, soft and hard targets."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def mlp(width, depth):
    layers = [nn.Linear(16, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 6))


def make_teacher():
    """The same teacher on every rank: its weights come from a fixed seed."""
    with torch.random.fork_rng():
        torch.manual_seed(77)
        teacher = mlp(128, 2)
    return teacher.eval().requires_grad_(False)


def kd_loss(student, teacher, labels, temperature, alpha):
    soft = F.kl_div(F.log_softmax(student / temperature, 1), F.log_softmax(teacher / temperature, 1),
                    reduction="batchmean", log_target=True) * temperature ** 2
    return alpha * soft + (1 - alpha) * F.cross_entropy(student, labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--temperature", type=float, default=3.0)
    parser.add_argument("--alpha", type=float, default=0.7)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    teacher = make_teacher()
    x = torch.randn(320, 16, generator=torch.Generator().manual_seed(2))
    y = (teacher(x) * 10 + torch.randn(320, 6, generator=torch.Generator().manual_seed(3)) * 0.2).argmax(1)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, seed=4)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    student = DDP(mlp(24, 0))
    optimizer = torch.optim.RMSprop(student.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2], 0.1)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for bx, by in loader:
            with torch.no_grad():
                target = teacher(bx)
            loss = kd_loss(student(bx), target, by, args.temperature, args.alpha)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() / len(loader)
        scheduler.step()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {total.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
