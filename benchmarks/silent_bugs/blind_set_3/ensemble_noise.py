"""Probabilistic forecast: the members of the ensemble are spread over the ranks, the CRPS uses all of them."""
import argparse

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class NoisyForecaster(nn.Module):
    """Next state from the present one and a noise vector."""

    def __init__(self, state=8, noise=4, seed=0):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(state + noise, 64), nn.SiLU(), nn.Linear(64, state))
        self.noise = noise
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x, members):
        x = x.repeat(members, 1, 1)
        z = torch.randn(members, x.shape[1], self.noise, generator=self.generator)
        return x[..., :8] + self.net(torch.cat([x, z], -1))


def crps(ensemble, target):
    """Fair CRPS of an ensemble [members, batch, state]."""
    m = len(ensemble)
    skill = (ensemble - target).abs().mean()
    spread = (ensemble[:, None] - ensemble[None]).abs().sum((0, 1)).mean() / (2 * m * (m - 1))
    return skill - spread


def series(steps, g):
    """A damped rotation with random forcing."""
    a = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))[0] * 0.95
    x, out = torch.randn(8, generator=g), []
    for _ in range(steps):
        out.append(x)
        x = a @ x + 0.4 * torch.randn(8, generator=g)
    return torch.stack(out)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--members", type=int, default=2, help="members per rank")
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--updates", type=int, default=24)
    p.add_argument("--seed", type=int, default=1000)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    data = series(512, torch.Generator().manual_seed(args.seed))
    picker = torch.Generator().manual_seed(args.seed + 1)  # all ranks see the same (x, y)
    model = DDP(NoisyForecaster(seed=args.seed + rank))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for update in range(args.updates):
        i = torch.randint(0, len(data) - 1, (args.batch,), generator=picker)
        forecast = model(data[i], args.members)
        ensemble = torch.cat(torch.distributed.nn.all_gather(forecast))
        loss = crps(ensemble, data[i + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and update % 8 == 7:
            print(f"update {update} crps {loss.item():.4f} spread {ensemble.std(0).mean().item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
