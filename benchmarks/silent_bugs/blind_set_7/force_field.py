"""Energy and force regression along the trajectory of one small molecule."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ATOMS = 6


def trajectory(n, heat, seed):
    """Harmonic springs between all atoms; the amplitude grows along the trajectory."""
    g = torch.Generator().manual_seed(3)
    rest = 1.5 * torch.randn(ATOMS, 3, generator=g)
    k = 0.2 + torch.rand(ATOMS, ATOMS, generator=g)
    k = (k + k.T) / 2
    g = torch.Generator().manual_seed(seed)
    amplitude = torch.linspace(0.05, heat, n)[:, None, None]
    pos = (rest + amplitude * torch.randn(n, ATOMS, 3, generator=g)).requires_grad_()
    length = torch.linalg.vector_norm(rest[:, None] - rest[None] + 1e-9, dim=-1)
    dist_ij = torch.linalg.vector_norm(pos[:, :, None] - pos[:, None] + 1e-9, dim=-1)
    energy = (0.25 * k * (dist_ij - length) ** 2).sum((1, 2))
    forces = -torch.autograd.grad(energy.sum(), pos)[0]
    return TensorDataset(pos.detach(), energy.detach(), forces)


class DirectForces(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(1 + 2 * ATOMS, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.energy = nn.Linear(hidden, 1)
        self.radial = nn.Linear(hidden, 1)
        eye = torch.eye(ATOMS)
        pair = torch.cat([eye[:, None].expand(ATOMS, ATOMS, ATOMS), eye[None].expand(ATOMS, ATOMS, ATOMS)], -1)
        self.register_buffer("pair", pair)

    def forward(self, pos):
        diff = pos[:, :, None] - pos[:, None]
        d = torch.linalg.vector_norm(diff + 1e-9, dim=-1, keepdim=True)
        h = self.edge(torch.cat([d, self.pair.expand(len(pos), -1, -1, -1)], -1))
        off_diagonal = 1.0 - torch.eye(ATOMS)[None, :, :, None]
        energy = (self.energy(h) * off_diagonal).sum((1, 2, 3))
        forces = (self.radial(h) * off_diagonal * diff / (d + 1e-6)).sum(2)
        return energy, forces


class Evaluator:
    """Running sums of every metric, so that a metric is total / numel at any time."""

    def eval(self, out, target, metrics):
        energy, forces = out
        values = {"energy_mae": (energy - target[0]).abs(),
                  "forces_mae": (forces - target[1]).abs(),
                  "forces_rmse2": (forces - target[1]) ** 2}
        for name, v in values.items():
            old = metrics.get(name, {"total": 0.0, "numel": 0})
            metrics[name] = {"total": old["total"] + v.sum().item(), "numel": old["numel"] + v.numel()}
        return metrics


def reduce_metrics(metrics):
    reduced = {}
    for name, m in metrics.items():
        pair = torch.tensor([m["total"], float(m["numel"])], dtype=torch.float64)
        dist.all_reduce(pair)
        reduced[name] = {"total": pair[0].item(), "numel": pair[1].item()}
    return reduced


@torch.no_grad()
def validate(model, loader):
    model.eval()
    evaluator, metrics = Evaluator(), {}
    for pos, energy, forces in loader:
        metrics = evaluator.eval(model(pos), (energy, forces), metrics)
    metrics = reduce_metrics(metrics)
    model.train()
    return {k: m["total"] / m["numel"] for k, m in metrics.items()}


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    train, val = trajectory(800, 0.4, seed=1), trajectory(240, 0.4, seed=2)
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=20, sampler=sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=20)
    torch.manual_seed(0)
    model = DDP(DirectForces())
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for pos, energy, forces in loader:
            e, f = model(pos)
            loss = F.l1_loss(e, energy) + 10.0 * F.l1_loss(f, forces)
            opt.zero_grad()
            loss.backward()
            opt.step()
        m = validate(model.module, val_loader)
        if rank == 0:
            print(f"epoch {epoch} energy MAE {m['energy_mae']:.4f} forces MAE {m['forces_mae']:.4f} "
                  f"forces RMSE {m['forces_rmse2'] ** 0.5:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
