"""Imbalanced classification; the test metric is a macro F1, which has to be
computed over all predictions at once."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

CLASSES = 5


class Particles(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        p = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
        self.y = torch.multinomial(p, n, replacement=True, generator=g)
        means = torch.randn(CLASSES, 16, generator=torch.Generator().manual_seed(4))
        self.x = means[self.y] + 1.3 * torch.randn(n, 16, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def balanced_indices(dataset, seed):
    """One epoch of class balanced draws; all ranks draw the same list."""
    counts = torch.bincount(dataset.y, minlength=CLASSES).clamp(min=1)
    weights = (1.0 / counts)[dataset.y]
    g = torch.Generator().manual_seed(seed)
    return list(WeightedRandomSampler(weights, len(dataset), replacement=True, generator=g))


def gather_in_order(local, total):
    """Put the pieces of a non shuffled DistributedSampler back in dataset order."""
    pieces = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, local)
    return torch.stack(pieces, 1).flatten()[:total]


def macro_f1(pred, target):
    scores = []
    for c in range(CLASSES):
        tp = ((pred == c) & (target == c)).sum()
        fp = ((pred == c) & (target != c)).sum()
        fn = ((pred != c) & (target == c)).sum()
        scores.append(2 * tp / (2 * tp + fp + fn).clamp(min=1))
    return torch.stack(scores).mean().item()


@torch.no_grad()
def evaluate(net, dataset):
    net.eval()
    sampler = DistributedSampler(dataset, shuffle=False)
    pred, target = [], []
    for x, y in DataLoader(dataset, batch_size=50, sampler=sampler):
        pred.append(net(x).argmax(1))
        target.append(y)
    pred = gather_in_order(torch.cat(pred), len(dataset))
    target = gather_in_order(torch.cat(target), len(dataset))
    assert torch.equal(target, dataset.y)
    return macro_f1(pred, target)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train_set, test_set = Particles(640, 1), Particles(333, 2)

    torch.manual_seed(6)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(4):
        net.train()
        draws = balanced_indices(train_set, seed=50 + epoch)[rank::world]
        loader = DataLoader(train_set, batch_size=64 // world, sampler=draws)
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
        f1 = evaluate(net, test_set)
        if rank == 0:
            print(f"epoch {epoch}: macro F1 {f1:.5f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
