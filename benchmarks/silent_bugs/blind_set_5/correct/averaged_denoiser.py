import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Average:
    def __init__(self, module, decay):
        self.module, self.decay = module, decay
        self.shadow = {n: t.detach().clone() for n, t in module.state_dict().items()}

    @torch.no_grad()
    def update(self):
        for n, t in self.module.state_dict().items():
            if t.is_floating_point():
                self.shadow[n].lerp_(t, 1 - self.decay)
            else:
                self.shadow[n].copy_(t)

    @contextlib.contextmanager
    def swapped(self):
        kept = {n: t.detach().clone() for n, t in self.module.state_dict().items()}
        self.module.load_state_dict(self.shadow)
        try:
            yield self.module
        finally:
            self.module.load_state_dict(kept)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 48), nn.LayerNorm(48), nn.SiLU(), nn.Linear(48, 8))

    def forward(self, x, t):
        return self.net(torch.cat([x, t], 1))


def objective(net, clean, g):
    t = torch.rand(len(clean), 1, generator=g)
    noise = torch.randn(clean.shape, generator=g)
    return (net((1 - t) * clean + t * noise, t) - (noise - clean)).pow(2).mean(1)


def data(count, g):
    return torch.randint(0, 2, (count, 1), generator=g) * 2.0 - 1 + 0.1 * torch.randn(count, 8, generator=g)


def main(updates=40, accumulate=2, batch=16):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    average = Average(model.module, 0.9)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    g = torch.Generator().manual_seed(200 + rank)
    held = data(64, torch.Generator().manual_seed(1))
    for update in range(updates):
        for k in range(accumulate):
            quiet = model.no_sync() if k + 1 < accumulate else contextlib.nullcontext()
            with quiet:
                (objective(model, data(batch, g), g).mean() / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average.update()
        if update % 10 == 9:
            with average.swapped() as net, torch.no_grad():
                mine = objective(net, held[rank::world], torch.Generator().manual_seed(3 + rank))
            total = torch.stack([mine.sum(), torch.tensor(float(len(mine)))])
            dist.all_reduce(total)
            if rank == 0:
                print(f"update {update + 1}: held-out error {total[0] / total[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
