"""fully_shard with a curriculum: the global batch grows, the learning rate
follows its square root. Ends with one full (unsharded) checkpoint."""
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CURRICULUM = [(10, 16), (10, 32), (10, 64)]  # (steps, global batch)
BASE_LR, BASE_BATCH = 2e-3, 16


class ResidualMLP(nn.Module):
    def __init__(self, width=48, depth=3):
        super().__init__()
        self.inp = nn.Linear(12, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.out = nn.Linear(width, 3)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


class Pool:
    """Endless shuffled pool; every rank walks the same order and takes its cut."""

    def __init__(self, n, rank, world):
        g = torch.Generator().manual_seed(6)
        self.x = torch.randn(n, 12, generator=g)
        self.y = (self.x[:, :3] * self.x[:, 3:6]).argmax(1)
        self.rank, self.world = rank, world
        self.gen = torch.Generator().manual_seed(60)
        self.order = torch.empty(0, dtype=torch.long)

    def take(self, global_batch):
        while len(self.order) < global_batch:
            more = torch.randperm(len(self.x), generator=self.gen)
            self.order = torch.cat([self.order, more])
        idx, self.order = self.order[:global_batch], self.order[global_batch:]
        idx = idx[self.rank :: self.world]
        return self.x[idx], self.y[idx]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))

    torch.manual_seed(0)
    model = ResidualMLP()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_LR, weight_decay=0.01)
    pool = Pool(2000, rank, world)

    for stage, (steps, global_batch) in enumerate(CURRICULUM):
        assert global_batch % world == 0
        for group in optimizer.param_groups:
            group["lr"] = BASE_LR * (global_batch / BASE_BATCH) ** 0.5
        mean = torch.zeros(())
        for _ in range(steps):
            x, y = pool.take(global_batch)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            mean += loss.detach() / steps
        norm = norm.full_tensor()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"stage {stage} batch {global_batch}: loss {mean.item() / world:.5f} norm {norm.item():.4f}")

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)  # all ranks take part
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.pt"
            torch.save(full, path)
            plain = ResidualMLP()
            plain.load_state_dict(torch.load(path))
        with torch.no_grad():
            acc = (plain(pool.x).argmax(1) == pool.y).float().mean().item()
        checksum = sum(v.double().abs().sum().item() for v in full.values())
        print(f"restored: accuracy {acc:.4f}, checksum {checksum:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
