"""Energies and forces of small molecules with a message passing network (DDP).

Molecules have 3 to 20 atoms, so each batch has another number of atoms.
"""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Molecules(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        charge = torch.tensor([1.0, 0.5, -0.7, -1.2])
        self.items = []
        for _ in range(n):
            na = int(3 + 17 * torch.rand(1, generator=g) ** 2)
            z = torch.randint(0, 4, (na,), generator=g)
            pos = 1.5 * na ** (1 / 3) * torch.randn(na, 3, generator=g)
            pos.requires_grad_(True)
            d = (pos[:, None] - pos[None] + 1e-3).norm(dim=-1) + 1.0
            q = charge[z]
            e = (torch.triu(q[:, None] * q[None] / d, 1)).sum()
            force = -torch.autograd.grad(e, pos)[0]
            self.items.append((z, pos.detach(), e.detach(), 4 * force))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch):
    """One big graph: nodes of all molecules, edges inside of each molecule."""
    z = torch.cat([b[0] for b in batch])
    pos = torch.cat([b[1] for b in batch])
    energy = torch.stack([b[2] for b in batch])
    force = torch.cat([b[3] for b in batch])
    src, dst, mol, off = [], [], [], 0
    for k, b in enumerate(batch):
        n = len(b[0])
        i, j = torch.where(~torch.eye(n, dtype=torch.bool))
        src.append(i + off)
        dst.append(j + off)
        mol.append(torch.full((n,), k))
        off += n
    return z, pos, energy, force, torch.cat(src), torch.cat(dst), torch.cat(mol)


class ForceField(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.emb = nn.Embedding(4, d)
        self.msg = nn.Sequential(nn.Linear(2 * d + 8, d), nn.SiLU(), nn.Linear(d, d), nn.SiLU())
        self.upd = nn.Sequential(nn.Linear(2 * d, d), nn.SiLU())
        self.energy = nn.Linear(d, 1)
        self.pair = nn.Sequential(nn.Linear(2 * d + 8, d), nn.SiLU(), nn.Linear(d, 1))
        self.register_buffer("centers", torch.linspace(0, 6, 8))

    def forward(self, z, pos, src, dst, mol, n_mol):
        vec = pos[dst] - pos[src]
        dist_ = vec.norm(dim=-1, keepdim=True).clamp_min(1e-3)
        rbf = torch.exp(-(dist_ - self.centers) ** 2)
        h = self.emb(z)
        m = self.msg(torch.cat([h[src], h[dst], rbf], -1))
        h = h + self.upd(torch.cat([h, torch.zeros_like(h).index_add(0, dst, m)], -1))
        w = self.pair(torch.cat([h[src], h[dst], rbf], -1))
        force = torch.zeros_like(pos).index_add(0, dst, w * vec / dist_)
        e = torch.zeros(n_mol).index_add(0, mol, self.energy(h).squeeze(-1))
        return e, force


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--force-weight", type=float, default=10.0)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(ForceField())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.85)

    train_set, val_set = Molecules(480, seed=1), Molecules(80, seed=2)
    sampler = DistributedSampler(train_set, world, rank, shuffle=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, collate_fn=collate, drop_last=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        run = torch.zeros(4, dtype=torch.float64)
        for z, pos, energy, force, src, dst, mol in loader:
            e_pred, f_pred = model(z, pos, src, dst, mol, len(energy))
            e_loss = (e_pred - energy).abs().mean()
            atom_err = (f_pred - force).norm(dim=-1)
            n_atoms = torch.tensor(float(len(z)))
            dist.all_reduce(n_atoms)
            f_loss = atom_err.sum() * world / n_atoms
            loss = e_loss + args.force_weight * f_loss
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            opt.step()
            with torch.no_grad():
                run += torch.stack([(e_pred - energy).abs().sum(), torch.tensor(float(len(energy))),
                                    atom_err.sum(), torch.tensor(float(len(z)))]).double()
        sched.step()
        dist.all_reduce(run)

        model.eval()
        val = torch.zeros(4, dtype=torch.float64)
        with torch.no_grad():
            for i in range(rank, len(val_set), world):
                z, pos, energy, force, src, dst, mol = collate([val_set[i]])
                e_pred, f_pred = model.module(z, pos, src, dst, mol, 1)
                val += torch.stack([(e_pred - energy).abs().sum(), torch.tensor(1.0),
                                    (f_pred - force).norm(dim=-1).sum(), torch.tensor(float(len(z)))]).double()
        dist.all_reduce(val)
        if rank == 0:
            print(f"epoch {epoch} train E {run[0] / run[1]:.4f} F {run[2] / run[3]:.4f} | "
                  f"val E {val[0] / val[1]:.4f} F {val[2] / val[3]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
