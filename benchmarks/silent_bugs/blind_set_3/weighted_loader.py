"""Fraud detection with a class-balanced loader that is made distributed by a helper."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

BATCH, EPOCHS = 16, 3


def make_data(n=384):
    g = torch.Generator().manual_seed(5)
    x = torch.randn(n, 20, generator=g)
    y = (torch.rand(n, generator=g) < 0.06).long()
    x[y == 1, :3] += 1.2
    return TensorDataset(x, y)


def balanced_loader(dataset):
    """One in sixteen rows is a fraud: draw both classes equally often."""
    y = dataset.tensors[1]
    weights = 1.0 / torch.bincount(y).float()[y]
    sampler = WeightedRandomSampler(weights, num_samples=len(dataset), replacement=True)
    return DataLoader(dataset, batch_size=BATCH, sampler=sampler, drop_last=True)


class ShardedSampler:
    """The draw of another sampler, the same on all ranks; each takes its part."""

    def __init__(self, sampler, seed):
        self.sampler, self.seed, self.epoch = sampler, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.sampler) // dist.get_world_size()

    def __iter__(self):
        self.sampler.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(list(self.sampler)[dist.get_rank()::dist.get_world_size()])


def to_distributed(loader):
    """The same loader, split over the ranks."""
    sampler = ShardedSampler(loader.sampler, seed=3)
    return DataLoader(loader.dataset, batch_size=loader.batch_size, sampler=sampler,
                      drop_last=loader.drop_last)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        return self.layers(x)


@torch.no_grad()
def recall(model, dataset):
    model.eval()
    x, y = dataset.tensors
    pred = model(x).argmax(1)
    model.train()
    return (pred[y == 1] == 1).float().mean().item()


def train():
    dist.init_process_group(backend="gloo")
    torch.manual_seed(17)
    torch.set_num_threads(1)
    dataset = make_data()
    loader = to_distributed(balanced_loader(dataset))
    net = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(net(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, recall of frauds {recall(net.module, dataset):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
