"""Transformer forecaster for daily sales, sharded with FSDP2 (fully_shard)."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAST, FUTURE, DIM = 28, 7, 32


class Sales(Dataset):
    def __init__(self, stores, seed):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(70.0)
        week = torch.randn(stores, 7, generator=g)[:, (t % 7).long()]
        trend = 0.02 * torch.randn(stores, 1, generator=g) * t
        self.series = week + trend + 0.2 * torch.randn(stores, 70, generator=g)
        self.windows = [(s, o) for s in range(stores) for o in range(0, 70 - PAST - FUTURE + 1, 7)]

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, i):
        s, o = self.windows[i]
        w = self.series[s, o:o + PAST + FUTURE]
        mean, std = w[:PAST].mean(), w[:PAST].std()
        w = (w - mean) / std
        return w[:PAST], w[PAST:]


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(7, DIM)
        self.pos = nn.Parameter(0.02 * torch.randn(PAST // 7, DIM))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 4, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2))
        self.head = nn.Linear(DIM * (PAST // 7), FUTURE)

    def forward(self, x):
        h = self.embed(x.view(len(x), -1, 7)) + self.pos
        for layer in self.layers:
            h = layer(h)
        return self.head(h.flatten(1))


@torch.no_grad()
def evaluate(model, dataset, rank, world):
    """Mean absolute error over all windows. All processes run the same number of forwards, as FSDP needs it;
    the windows that only fill up the last round are not counted."""
    model.eval()
    sums = torch.zeros(2)
    rounds = (len(dataset) + world * 32 - 1) // (world * 32)
    for k in range(rounds):
        idx = [k * world * 32 + rank * 32 + j for j in range(32)]
        valid = torch.tensor([i < len(dataset) for i in idx]).float()
        past, future = torch.utils.data.default_collate([dataset[min(i, len(dataset) - 1)] for i in idx])
        err = (model(past) - future).abs().mean(1)
        sums += torch.stack([(err * valid).sum(), valid.sum()])
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1]).item(), int(sums[1])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Forecaster()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    train, val = Sales(64, seed=1), Sales(15, seed=2)
    sampler = DistributedSampler(train, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(train, batch_size=32 // world, sampler=sampler, drop_last=True)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=5)

    for epoch in range(5):
        sampler.set_epoch(epoch)
        log = torch.zeros(2)
        for past, future in loader:
            loss = F.huber_loss(model(past), future)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            log += torch.tensor([loss.item(), 1.0])
        sched.step()
        dist.all_reduce(log)
        norm = norm.full_tensor().item()
        mae, n = evaluate(model, val, rank, world)
        if rank == 0:
            print(f"epoch {epoch} huber {log[0] / log[1]:.4f} last grad norm {norm:.3f} val mae {mae:.4f} ({n})",
                  flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
