"""Image classification with numpy augmentation in the loader workers."""
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler


def make_images(n, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, n)
    images = rng.normal(0, 0.35, (n, 20, 20)).astype(np.float32)
    for img, y in zip(images, labels):
        r, c = rng.integers(3, 9, 2)
        if y == 0:
            img[r:r + 8, c] += 1.5
        elif y == 1:
            img[r, c:c + 8] += 1.5
        elif y == 2:
            img[np.arange(r, r + 8), np.arange(c, c + 8)] += 1.5
        else:
            img[r:r + 6, c:c + 6] += 0.9
    return images, labels.astype(np.int64)


class Shapes(Dataset):
    def __init__(self, n, seed, train):
        self.images, self.labels = make_images(n, seed)
        self.train = train

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        img = self.images[i]
        if self.train:
            dr, dc = np.random.randint(-2, 3, 2)
            img = np.roll(img, (dr, dc), axis=(0, 1))
            img = img * np.random.uniform(0.8, 1.2) + np.random.normal(0, 0.1, img.shape)
            if random.random() < 0.5:
                img = img[::-1, ::-1]
        return torch.from_numpy(np.ascontiguousarray(img, dtype=np.float32))[None], int(self.labels[i])


def seed_worker(worker_id):
    """https://pytorch.org/docs/stable/notes/randomness.html#dataloader"""
    worker_seed = torch.initial_seed() % 2**32
    np.random.seed(worker_seed)
    random.seed(worker_seed)


def get_generator(seed):
    g = torch.Generator()
    g.manual_seed(seed + dist.get_rank())
    return g


def build_net():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(128, 4))


@torch.no_grad()
def accuracy(net, loader):
    net.eval()
    hits = torch.zeros(2)
    for x, y in loader:
        hits[0] += (net(x).argmax(1) == y).sum()
        hits[1] += len(y)
    dist.all_reduce(hits)
    net.train()
    return (hits[0] / hits[1]).item()


def main(seed=3, epochs=5):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    train_set, val_set = Shapes(512, 10, train=True), Shapes(203, 11, train=False)
    sampler = DistributedSampler(train_set, num_replicas=world, rank=rank, shuffle=True, seed=seed)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler, num_workers=2,
                        worker_init_fn=seed_worker, generator=get_generator(seed))
    val_part = Subset(val_set, range(rank, len(val_set), world))
    val_loader = DataLoader(val_part, batch_size=64)

    torch.manual_seed(seed)
    net = DDP(build_net())
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=epochs)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(2)
        for x, y in loader:
            loss = F.cross_entropy(net(x), y, label_smoothing=0.05)
            opt.zero_grad()
            loss.backward()
            opt.step()
            running += torch.tensor([loss.item() * len(y), float(len(y))])
        sched.step()
        dist.all_reduce(running)
        acc = accuracy(net.module, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: train loss {running[0] / running[1]:.4f}  val acc {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
