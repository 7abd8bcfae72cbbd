import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class ScaleNorm(nn.Module):
    """RMS norm over activations that are split along the sequence."""

    def __init__(self, dim, mesh):
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(torch.ones(dim), mesh, [Replicate()]))

    def forward(self, x):
        local = x.to_local()
        weight = self.weight.to_local(grad_placements=[Partial()])
        local = local * torch.rsqrt(local.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
        return DTensor.from_local(local, self.mesh, [Shard(1)], run_check=False)


class Ffn(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)))


class Model(nn.Module):
    def __init__(self, mesh, vocab=32, dim=16):
        super().__init__()
        self.mesh = mesh
        self.embed = nn.Embedding(vocab, dim)
        self.norm = ScaleNorm(dim, mesh)
        self.ffn = Ffn(dim, 4 * dim)
        self.out = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        full = self.embed(ids)
        h = DTensor.from_local(full, self.mesh, [Replicate()], run_check=False)
        h = self.norm(h.redistribute(placements=[Shard(1)]))
        return self.out(full + self.ffn(h))


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Model(mesh)
    parallelize_module(
        model.ffn,
        mesh,
        {
            "w1": ColwiseParallel(input_layouts=Shard(1)),
            "w2": RowwiseParallel(output_layouts=Replicate()),
        },
    )
    opt = torch.optim.AdamW(model.parameters(), lr=2e-2, foreach=False)
    data = torch.Generator().manual_seed(1)
    for step in range(16):
        ids = torch.randint(0, 32, (6, 8), generator=data)
        target = (5 * ids + 3) % 32
        loss = F.cross_entropy(model(ids).flatten(0, 1), target.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if mesh.get_rank() == 0 and step % 4 == 3:
            print(f"step {step + 1} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
