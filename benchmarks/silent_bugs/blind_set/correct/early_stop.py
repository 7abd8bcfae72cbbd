import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class EarlyStopping:
    """Lives on the main process; the others only hear the verdict."""

    def __init__(self, patience, min_delta):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.bad, self.weights = float("inf"), 0, None

    def update(self, value, module):
        if value < self.best - self.min_delta:
            self.best, self.bad = value, 0
            self.weights = copy.deepcopy(module.state_dict())
        else:
            self.bad += 1
        return self.bad >= self.patience


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 20, generator=g)
    y = torch.sin(2 * x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3] + 0.4 * torch.randn(n, 1, generator=g)
    return TensorDataset(x, y)


@torch.no_grad()
def full_loss(module, dataset):
    module.eval()
    x, y = dataset.tensors
    loss = nn.functional.mse_loss(module(x), y).item()
    module.train()
    return loss


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    is_main = rank == 0
    torch.manual_seed(0)

    train_set, val_set = make_data(512, 1), make_data(256, 2)
    sampler = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(train_set, batch_size=args.global_batch // world, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    stopper = EarlyStopping(args.patience, 1e-4) if is_main else None

    for epoch in range(args.max_epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        stop = torch.zeros(1, dtype=torch.int)
        if is_main:
            val = full_loss(model.module, val_set)
            stop[0] = int(stopper.update(val, model.module))
            print(f"epoch {epoch}: val mse {val:.5f} (best {stopper.best:.5f})")
        dist.broadcast(stop, src=0)
        if stop.item():
            if is_main:
                print(f"stopping after epoch {epoch}")
            break

    # everybody goes on with the best weights of the main process
    if is_main:
        model.module.load_state_dict(stopper.weights)
    for t in model.module.state_dict().values():
        dist.broadcast(t, src=0)
    final = torch.tensor([full_loss(model.module, make_data(256, 3))])
    lo, hi = final.clone(), final.clone()
    dist.all_reduce(lo, op=dist.ReduceOp.MIN)
    dist.all_reduce(hi, op=dist.ReduceOp.MAX)
    assert torch.equal(lo, hi), "replicas differ"
    if is_main:
        print(f"test mse {final.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--global-batch", type=int, default=32)
    p.add_argument("--max-epochs", type=int, default=25)
    p.add_argument("--patience", type=int, default=3)
    p.add_argument("--lr", type=float, default=5e-3)
    main(p.parse_args())
