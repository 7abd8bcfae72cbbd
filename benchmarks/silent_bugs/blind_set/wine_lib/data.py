import torch
from torch.utils.data import Dataset


class Wines(Dataset):
    """Chemical measurements -> quality class. The labels are noisy."""

    def __init__(self, n=400, features=24, classes=4, noise=0.35):
        g = torch.Generator().manual_seed(77)
        self.x = torch.randn(n, features, generator=g)
        clean = (self.x @ torch.randn(features, classes, generator=g)).argmax(1)
        random = torch.randint(0, classes, (n,), generator=g)
        self.y = torch.where(torch.rand(n, generator=g) < noise, random, clean)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]
