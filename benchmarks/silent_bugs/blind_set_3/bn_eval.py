"""Convolutional net with batch norm; validation split over the ranks, rank 0 keeps the best checkpoint."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def textures(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    grid = torch.arange(12).float()
    waves = torch.stack([torch.sin(grid * (0.6 + 0.4 * k)) for k in range(4)])
    x = waves[y][:, None, :, None] * waves[(y + 1) % 4][:, None, None, :]
    return TensorDataset(x * 2 + torch.randn(n, 1, 12, 12, generator=g) + 0.5, y)


def net():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 4))


class EvalHook:
    def __init__(self, dataset, rank, world):
        self.loader = DataLoader(Subset(dataset, range(rank, len(dataset), world)), batch_size=32)
        self.best, self.state = 0.0, None

    @torch.no_grad()
    def after_train_epoch(self, model, epoch):
        for module in model.module.modules():
            if isinstance(module, nn.BatchNorm2d):  # all ranks test the model that rank 0 saves
                dist.broadcast(module.running_mean, 0)
                dist.broadcast(module.running_var, 0)
        model.eval()
        hits = torch.zeros(2)
        for x, y in self.loader:
            hits += torch.tensor([(model.module(x).argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(hits)
        accuracy = (hits[0] / hits[1]).item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} accuracy {accuracy:.4f}")
            if accuracy > self.best:
                self.best = accuracy
                self.state = {k: v.clone() for k, v in model.module.state_dict().items()}
        model.train()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train_set, val_set = textures(288, 1), textures(120, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler, drop_last=True)
    # find_unused_parameters and the broadcast cost time at every forward
    model = DDP(net(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    hook = EvalHook(val_set, rank, world)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        hook.after_train_epoch(model, epoch)
    if rank == 0:
        final = net()
        final.load_state_dict(hook.state)
        final.eval()
        with torch.no_grad():
            acc = (final(val_set.tensors[0]).argmax(1) == val_set.tensors[1]).float().mean()
        print(f"checkpoint tested alone: {acc:.4f} (logged {hook.best:.4f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
