"""Small CNN with numpy augmentation in the loader's worker."""
import argparse

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Shapes(Dataset):
    """8x8 crosses and boxes; the augmentation shifts, flips and adds noise."""

    def __init__(self, n, train=True):
        rng = np.random.RandomState(4)
        self.y = rng.randint(0, 3, n)
        self.x = np.zeros((n, 8, 8), np.float32)
        for k, c in enumerate(self.y):
            i, j = rng.randint(1, 4, 2)
            if c == 0:
                self.x[k, i:i + 4, j + 1] = 1
            elif c == 1:
                self.x[k, i + 1, j:j + 4] = 1
            else:
                self.x[k, i:i + 3, j:j + 3] = 1
        self.train = train

    def __len__(self):
        return len(self.y)

    def __getitem__(self, k):
        img = self.x[k]
        if self.train:
            img = np.roll(img, np.random.randint(-1, 2, 2), (0, 1))
            if np.random.rand() < 0.5:
                img = img[:, ::-1]
            img = img + 0.3 * np.random.randn(8, 8)
        return torch.as_tensor(np.ascontiguousarray(img), dtype=torch.float32)[None], int(self.y[k])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        return self.fc(F.relu(self.c2(x)).amax((2, 3)))


def main(args):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)

    def seed_worker(worker_id):
        np.random.seed((torch.initial_seed() + 10000 * rank) % 2 ** 32)

    train_set = Shapes(256)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler, num_workers=args.workers,
                        worker_init_fn=seed_worker, drop_last=True)
    model = nn.parallel.DistributedDataParallel(Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
        if rank == 0:
            print("epoch", epoch, "loss", round(loss.item(), 4))
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--workers", type=int, default=1)
    p.add_argument("--epochs", type=int, default=3)
    main(p.parse_args())
