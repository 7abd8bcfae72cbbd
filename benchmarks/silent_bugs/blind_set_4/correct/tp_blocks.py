import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class GatedFFN(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self, vocab=36, dim=16, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(GatedFFN(dim, 48) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)  # replicated parameters must start equal on all ranks
    model = Model()
    for block in model.blocks:
        plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, foreach=False)
    # every tensor-parallel rank reads the same rows
    data = torch.Generator().manual_seed(1 + mesh["dp"].get_local_rank())
    for step in range(16):
        ids = torch.randint(0, 36, (8, 10), generator=data)
        loss = F.cross_entropy(model(ids).flatten(0, 1), (7 * ids + 1).remainder(36).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 4 == 3:
            print(f"step {step + 1} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
