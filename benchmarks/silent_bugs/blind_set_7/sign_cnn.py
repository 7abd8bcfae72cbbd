"""Small CNN on 16x16 sign images, DistributedDataParallel.

    torchrun --nproc-per-node 2 sign_cnn.py
"""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

NUM_CLASSES = 8


def make_signs(n, seed):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(NUM_CLASSES, 1, 16, 16, generator=torch.Generator().manual_seed(7))
    labels = torch.randint(0, NUM_CLASSES, (n,), generator=g)
    images = proto[labels] + 2.6 * torch.randn(n, 1, 16, 16, generator=g)
    return TensorDataset(images, labels)


class SignNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.norm1 = nn.GroupNorm(2, 8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm2 = nn.GroupNorm(4, 16)
        self.fc = nn.Linear(16 * 4 * 4, NUM_CLASSES)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.relu(self.norm2(self.conv2(x)))
        return self.fc(x.flatten(1))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    counts = torch.zeros(3, dtype=torch.float64)
    for images, labels in loader:
        logits = model(images)
        counts[0] += F.cross_entropy(logits, labels, reduction="sum").item()
        counts[1] += (logits.argmax(1) == labels).sum().item()
        counts[2] += labels.numel()
    dist.all_reduce(counts)
    model.train()
    return counts[0] / counts[2], counts[1] / counts[2]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    train_set = make_signs(1024, seed=1)
    test_set = make_signs(301, seed=2)
    train_sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    # every process scores its own part of the test images
    test_part = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(test_part, batch_size=64)

    model = DDP(SignNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        running = torch.zeros(2)
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            running += torch.tensor([loss.item() * len(labels), len(labels)])
        dist.all_reduce(running)
        test_loss, test_acc = evaluate(model, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: train loss {running[0] / running[1]:.4f}  "
                  f"test loss {test_loss:.4f}  test acc {test_acc:.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
