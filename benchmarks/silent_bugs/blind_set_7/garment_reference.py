"""Classification reference script: garments, with distributed evaluation."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Garments(Dataset):
    """12x12 gray images of 10 kinds of garments, with extra noise while training."""

    def __init__(self, n, seed, train):
        g = torch.Generator().manual_seed(seed)
        proto = torch.randn(10, 1, 12, 12, generator=torch.Generator().manual_seed(31))
        self.targets = torch.randint(0, 10, (n,), generator=g)
        self.images = proto[self.targets] + 2.2 * torch.randn(n, 1, 12, 12, generator=g)
        self.train = train

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        image = self.images[i]
        if self.train:
            image = image + 0.2 * torch.randn_like(image)
        return image, self.targets[i]


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.GroupNorm(3, 24), nn.ReLU(),
        nn.Flatten(), nn.Linear(24 * 36, 10),
    )


def train_one_epoch(model, criterion, optimizer, loader, epoch):
    model.train()
    start, total, seen = time.time(), 0.0, 0
    for image, target in loader:
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * image.size(0)
        seen += image.size(0)
    stats = torch.tensor([total, seen], dtype=torch.float64)
    dist.all_reduce(stats)
    if dist.get_rank() == 0:
        print(f"Epoch: [{epoch}] loss {stats[0] / stats[1]:.4f}  time {time.time() - start:.1f}s")


@torch.inference_mode()
def evaluate(model, criterion, loader):
    model.eval()
    loss_sum, top1, top5, n = 0.0, 0, 0, 0
    for image, target in loader:
        output = model(image)
        loss_sum += criterion(output, target).item() * target.numel()
        hits = output.topk(5, dim=1).indices == target[:, None]
        top1 += hits[:, 0].sum().item()
        top5 += hits.sum().item()
        n += target.numel()
    t = torch.tensor([loss_sum, top1, top5, n], dtype=torch.float64)
    dist.barrier()
    dist.all_reduce(t)
    loss_sum, top1, top5, n = t.tolist()
    if dist.get_rank() == 0:
        print(f"Test: loss {loss_sum / n:.4f} Acc@1 {100 * top1 / n:.3f} Acc@5 {100 * top5 / n:.3f}")
    return top1 / n


def main(args):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_set = Garments(960, seed=1, train=True)
    test_set = Garments(175, seed=2, train=False)
    train_sampler = DistributedSampler(train_set)
    test_sampler = range(rank, len(test_set), world_size)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    test_loader = DataLoader(test_set, batch_size=args.batch_size, sampler=test_sampler)

    torch.manual_seed(args.seed)
    model = nn.parallel.DistributedDataParallel(build_model())
    torch.manual_seed(args.seed + rank)      # image noise

    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.3)

    best = 0.0
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, train_loader, epoch)
        lr_scheduler.step()
        best = max(best, evaluate(model, criterion, test_loader))
    if rank == 0:
        print(f"best Acc@1 {100 * best:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=6, type=int)
    parser.add_argument("-b", "--batch-size", default=24, type=int)
    parser.add_argument("--lr", default=0.02, type=float)
    parser.add_argument("--seed", default=3, type=int)
    main(parser.parse_args())
