import copy
import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclasses.dataclass
class Config:
    epochs: int = 8
    tune_epochs: int = 2
    lr: float = 0.3
    tune_lr: float = 0.02
    batch: int = 16


class Best:
    """Keeps the weights with the lowest validation loss."""

    def __init__(self):
        self.loss, self.epoch, self.weights = float("inf"), -1, None

    def offer(self, loss, epoch, module):
        if loss < self.loss:
            self.loss, self.epoch = loss, epoch
            self.weights = copy.deepcopy(module.state_dict())


def regression(count, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=g)
    return TensorDataset(x, (x[:, :1] * 2).sin() + x[:, 1:2] + 0.5 * torch.randn(count, 1, generator=g))


def run_epoch(model, loader, optimizer, epoch):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def validate(model, loader):
    total = torch.zeros(2)
    for x, y in loader:
        total += torch.tensor([nn.functional.mse_loss(model.module(x), y, reduction="sum"), len(y)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main(cfg):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, val = regression(128, 1), regression(32, 2)
    train_loader = DataLoader(train, cfg.batch, sampler=DistributedSampler(train))
    val_loader = DataLoader(val, cfg.batch, sampler=DistributedSampler(val, shuffle=False))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    best = Best()
    for epoch in range(cfg.epochs):
        loss = run_epoch(model, train_loader, optimizer, epoch)
        val_loss = validate(model, val_loader)
        best.offer(val_loss, epoch, model.module)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} train {loss:.4f} val {val_loss:.4f} best {best.epoch}")
    model.module.load_state_dict(best.weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.tune_lr)
    for epoch in range(cfg.tune_epochs):
        loss = run_epoch(model, train_loader, optimizer, cfg.epochs + epoch)
    val_loss = validate(model, val_loader)
    if dist.get_rank() == 0:
        print(f"tuned from epoch {best.epoch}: train {loss:.4f} val {val_loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Config())
