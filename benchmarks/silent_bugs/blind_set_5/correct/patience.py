import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def series(count, seed):
    g = torch.Generator().manual_seed(seed)
    level = torch.randn(count, 1, generator=g)
    x = level + 0.4 * torch.randn(count, 12, generator=g).cumsum(1)
    return x, x[:, -1:] * 0.7 + level * 0.3 + 0.3 * torch.randn(count, 1, generator=g)


class Patience:
    def __init__(self, epochs):
        self.epochs, self.best, self.since, self.weights = epochs, float("inf"), 0, None

    def __call__(self, loss, module):
        if loss < self.best:
            self.best, self.since, self.weights = loss, 0, copy.deepcopy(module.state_dict())
        else:
            self.since += 1
        return self.since >= self.epochs


@torch.no_grad()
def validate(model, x, y):
    model.eval()
    sums = torch.stack([(model.module(x) - y).square().sum(), torch.tensor(float(len(y)))])
    model.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = (t[rank::world] for t in series(96, 1))
    vx, vy = (t[rank::world] for t in series(61, 2))
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    drop = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1)
    enough = Patience(4)
    g = torch.Generator().manual_seed(6 + rank)
    for epoch in range(30):
        for rows in torch.randperm(len(x), generator=g).split(8):
            loss = nn.functional.mse_loss(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        value = validate(model, vx, vy)
        drop.step(value)
        if enough(value, model.module):
            break
    model.module.load_state_dict(enough.weights)
    value = validate(model, vx, vy)
    if rank == 0:
        print(f"stopped after epoch {epoch}, best {enough.best:.4f}, restored {value:.4f}, lr {optimizer.param_groups[0]['lr']:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
