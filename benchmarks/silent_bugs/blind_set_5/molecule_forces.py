import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Interaction(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * width + 1, width), nn.SiLU(), nn.Linear(width, width))
        self.gate = nn.Linear(width, 1)

    def forward(self, h, pos, src, dst):
        delta = pos[src] - pos[dst]
        message = self.edge(torch.cat([h[src], h[dst], delta.norm(dim=-1, keepdim=True)], -1))
        push = torch.zeros_like(pos).index_add(0, dst, self.gate(message) * delta)
        return h + torch.zeros_like(h).index_add(0, dst, message), push


class ForceNet(nn.Module):
    def __init__(self, kinds=5, width=24):
        super().__init__()
        self.embed = nn.Embedding(kinds, width)
        self.layers = nn.ModuleList(Interaction(width) for _ in range(2))

    def forward(self, kind, pos, src, dst):
        h, force = self.embed(kind), 0
        for layer in self.layers:
            h, push = layer(h, pos, src, dst)
            force = force + push
        return force


def molecules(count, g):
    """A batch of molecules of three to twenty atoms, as one graph."""
    kinds, positions, src, dst, start = [], [], [], [], 0
    for _ in range(count):
        n = int(torch.randint(3, 21, (1,), generator=g))
        kinds.append(torch.randint(0, 5, (n,), generator=g))
        positions.append(torch.randn(n, 3, generator=g))
        pairs = torch.combinations(torch.arange(n))
        pairs = torch.cat([pairs, pairs.flip(1)]) + start
        src.append(pairs[:, 0])
        dst.append(pairs[:, 1])
        start += n
    kind, pos = torch.cat(kinds), torch.cat(positions)
    src, dst = torch.cat(src), torch.cat(dst)
    delta = pos[src] - pos[dst]
    strength = (kind[src] - kind[dst]).float().unsqueeze(1) * 0.1
    target = torch.zeros_like(pos).index_add(0, dst, strength * delta)
    return (kind, pos, src, dst), target


def main(steps=40, per_rank=3):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(ForceNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    g = torch.Generator().manual_seed(100 + dist.get_rank())
    for step in range(steps):
        graph, target = molecules(per_rank, g)
        error = (model(*graph) - target).norm(dim=-1)
        atoms = torch.tensor(float(len(error)))
        dist.all_reduce(atoms)
        loss = error.sum() * dist.get_world_size() / atoms
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            print(f"{step + 1:3d} force error {error.mean().item():.4f} ({len(error)} atoms)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
