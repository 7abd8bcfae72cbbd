import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class PointNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.features = nn.Sequential(
            nn.Linear(5, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()
        )
        self.head = nn.Linear(32, classes)

    def forward(self, points):
        return self.head(self.features(points))


def scans(count, seed):
    """Scans with very different numbers of points; big ones are brighter."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        n = int(torch.randint(8, 160, (1,), generator=g))
        points = torch.randn(n, 5, generator=g)
        label = (points[:, 0] > 0).long() * 2 + (points[:, 1] * points[:, 2] > 0).long()
        out.append((points * 1.5 + n / 40, label))
    return out


@torch.no_grad()
def update_bn_stats(module, batches):
    """Statistics over all batches of all ranks instead of moving averages."""
    layers = [m for m in module.modules() if isinstance(m, nn.BatchNorm1d)]
    kept = {bn: torch.zeros(2, bn.num_features) for bn in layers}
    batch = {}

    def note(bn, inputs):
        x = inputs[0]
        batch[bn] = torch.cat([x.sum(0), x.square().sum(0), torch.tensor([float(len(x))])])

    handles = [bn.register_forward_pre_hook(note) for bn in layers]
    module.train()
    seen = 0.0
    for points, _ in batches:
        module(points)
        size = torch.tensor(float(len(points)))
        dist.all_reduce(size)
        seen = seen + size
        for bn, sums in batch.items():
            dist.all_reduce(sums)
            moments = (sums[:-1] / sums[-1]).view(2, -1)
            kept[bn] += (moments - kept[bn]) * (size / seen)
    for bn, (mean, square) in kept.items():
        bn.running_mean.copy_(mean)
        bn.running_var.copy_(square - mean**2)
    for handle in handles:
        handle.remove()


@torch.no_grad()
def accuracy(module, batches):
    module.eval()
    counts = torch.zeros(2)
    for points, label in batches:
        counts += torch.tensor([(module(points).argmax(1) == label).sum(), len(label)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = scans(24, 1)[rank::world], scans(12, 2)[rank::world]
    torch.manual_seed(0)
    model = DistributedDataParallel(PointNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(4):
        model.train()
        for points, label in train:
            loss = nn.functional.cross_entropy(model(points), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    before = accuracy(model.module, test)
    update_bn_stats(model.module, train)
    after = accuracy(model.module, test)
    variance = model.module.features[1].running_var.mean().item()
    print(f"rank {rank}: accuracy {before:.4f}, with exact statistics {after:.4f} (variance {variance:.5f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
