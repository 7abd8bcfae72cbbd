import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class GraphNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.inp = nn.Linear(4, width)
        self.mix = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.out = nn.Linear(width, 1)

    def forward(self, x, edges, graph, count):
        h = self.inp(x).relu()
        for layer in self.mix:
            near = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
            h = h + layer(torch.cat([h, near], 1)).relu()
        pooled = torch.zeros(count, h.shape[1]).index_add(0, graph, h)
        return self.out(pooled).squeeze(1)


def draw(g, most=6):
    count = int(torch.randint(0, most, (1,), generator=g))
    nodes, edges, graph, start = [torch.zeros(0, 4)], [torch.zeros(2, 0, dtype=torch.long)], [], 0
    for n in range(count):
        size = int(torch.randint(2, 12, (1,), generator=g))
        nodes.append(torch.rand(size, 4, generator=g))
        edges.append(start + torch.randint(0, size, (2, 2 * size), generator=g))
        graph += [n] * size
        start += size
    x, graph = torch.cat(nodes), torch.tensor(graph, dtype=torch.long)
    y = torch.zeros(count).index_add(0, graph, x[:, 0] - x[:, 1])
    return (x, torch.cat(edges, 1), graph, count), y


def main(steps=40):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(GraphNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    g = torch.Generator().manual_seed(300 + rank)
    for step in range(steps):
        batch, y = draw(g)
        graphs = torch.tensor(float(len(y)))
        dist.all_reduce(graphs)
        squared = (model(*batch) - y).square().sum()
        optimizer.zero_grad()
        (squared * world / graphs.clamp(min=1)).backward()
        if graphs > 0:
            optimizer.step()
        shown = squared.detach()
        dist.all_reduce(shown)
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: {shown / graphs.clamp(min=1):.4f} over {int(graphs)} graphs")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
