"""Node classification on one graph, GraphSAGE with sampled neighbours, training nodes split over ranks."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

NODES, FEATS, CLASSES, FANOUT = 1200, 16, 5, 6
EPOCHS, BATCH, LR = 8, 25, 5e-3


def make_graph(seed=0):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, CLASSES, (NODES,), generator=g)
    centre = torch.randn(CLASSES, FEATS, generator=g)
    feat = 0.5 * centre[label] + 1.5 * torch.randn(NODES, FEATS, generator=g)
    # 10 neighbours of each node, most of them of the same class
    same = torch.rand(NODES, 10, generator=g) < 0.7
    nbr = torch.randint(0, NODES, (NODES, 10), generator=g)
    by_class = [torch.where(label == c)[0] for c in range(CLASSES)]
    for i in range(NODES):
        pool = by_class[int(label[i])]
        own = pool[torch.randint(0, len(pool), (10,), generator=g)]
        nbr[i] = torch.where(same[i], own, nbr[i])
    perm = torch.randperm(NODES, generator=g)
    return feat, nbr, label, perm[:800], perm[800:]


class SAGE(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.l1, self.l2 = nn.Linear(2 * FEATS, d), nn.Linear(2 * d, CLASSES)
        self.drop = nn.Dropout(0.3)

    def layer(self, lin, own, neighbours):
        return lin(torch.cat([own, neighbours.mean(-2)], -1))

    def forward(self, feat, nodes, n1, n2):
        """n1: neighbours of the nodes (B x k), n2: neighbours of nodes and n1 (B x (1 + k) x k)."""
        first = torch.cat([nodes[:, None], n1], 1)
        h = self.drop(F.relu(self.layer(self.l1, feat[first], feat[n2])))
        return self.layer(self.l2, h[:, 0], h[:, 1:])


def sample(nbr, nodes, k):
    pick = torch.randint(0, nbr.shape[1], (*nodes.shape, k))
    return nbr[nodes].gather(-1, pick)


def average_gradients(model, world):
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= world
    at = 0
    for p in model.parameters():
        p.grad.copy_(flat[at:at + p.numel()].view_as(p))
        at += p.numel()


@torch.no_grad()
def test(model, feat, nbr, label, nodes):
    model.eval()
    n1 = nbr[nodes]
    first = torch.cat([nodes[:, None], n1], 1)
    right = (model(feat, nodes, n1, nbr[first]).argmax(1) == label[nodes]).sum()
    stat = torch.stack([right, torch.tensor(len(nodes))])
    dist.all_reduce(stat)
    return (stat[0] / stat[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    feat, nbr, label, train, held_out = make_graph()
    torch.manual_seed(4)
    model = SAGE()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    opt = torch.optim.Adam(model.parameters(), lr=LR, weight_decay=5e-4)
    torch.manual_seed(4000 + rank)  # neighbours and dropout

    for epoch in range(EPOCHS):
        model.train()
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
        mine = train[order][rank::world]
        usable = len(train) // world // BATCH * BATCH  # full batches, the same number on all ranks
        run = torch.zeros(2)
        for nodes in mine[:usable].split(BATCH):
            n1 = sample(nbr, nodes, FANOUT)
            n2 = sample(nbr, torch.cat([nodes[:, None], n1], 1), FANOUT)
            loss = F.cross_entropy(model(feat, nodes, n1, n2), label[nodes])
            opt.zero_grad()
            loss.backward()
            average_gradients(model, world)
            opt.step()
            run += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(run)
        acc = test(model, feat, nbr, label, held_out[rank::world])
        if rank == 0:
            print(f"epoch {epoch} loss {run[0] / run[1]:.4f} test acc {acc:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
