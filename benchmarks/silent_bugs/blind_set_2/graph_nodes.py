"""Node classification with a two-layer GCN. Every rank holds the (small) graph and its share of the nodes."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def make_graph(n=240, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, generator=g) < 0.2).long()
    same = y[:, None] == y[None, :]
    p = torch.where(same, torch.tensor(0.10), torch.tensor(0.04))
    up = torch.triu(torch.rand(n, n, generator=g) < p, 1).float()
    adj = up + up.t() + torch.eye(n)
    d = adj.sum(1).rsqrt()
    x = torch.randn(n, 8, generator=g) + 0.5 * y[:, None]
    return d[:, None] * adj * d[None, :], x, y


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, adj, x, nodes):
        h = F.relu(adj @ self.w1(x))
        return (adj @ self.w2(h))[nodes]


@torch.no_grad()
def f1_score(model, adj, x, y, nodes):
    model.eval()
    pred, truth = model(adj, x, nodes).argmax(1), y[nodes]
    tp = ((pred == 1) & (truth == 1)).sum()
    fp = ((pred == 1) & (truth == 0)).sum()
    fn = ((pred == 0) & (truth == 1)).sum()
    model.train()
    c = torch.stack([tp, fp, fn]).double()
    dist.all_reduce(c)
    return (2 * c[0] / (2 * c[0] + c[1] + c[2]).clamp(min=1)).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    adj, x, y = make_graph()
    perm = torch.randperm(len(y), generator=torch.Generator().manual_seed(1))
    train, test = perm[:160], perm[160:]
    model = DDP(GCN())
    opt = torch.optim.Adam(model.parameters(), lr=0.03)
    weight = torch.tensor([1.0, 3.0])
    shuffler = torch.Generator().manual_seed(2)
    for epoch in range(10):
        order = train[torch.randperm(len(train), generator=shuffler)]
        for chunk in order.split(40):
            nodes = chunk[rank::world]
            each = F.cross_entropy(model(adj, x, nodes), y[nodes], weight=weight, reduction="none")
            loss = each.mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        if epoch % 3 == 0:
            score = f1_score(model.module, adj, x, y, test[rank::world])
            if rank == 0:
                print(f"epoch {epoch} test F1 {score:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
