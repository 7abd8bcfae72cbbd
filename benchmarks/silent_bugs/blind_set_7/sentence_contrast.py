"""Contrastive sentence embeddings: two spans of one document are a pair, the rest are negatives."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

VOCAB, TOPICS, DOC_LEN, SPAN = 200, 12, 60, 16


class Documents(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        topics = (2.0 * torch.randn(TOPICS, VOCAB, generator=torch.Generator().manual_seed(5))).softmax(-1)
        mix = torch.distributions.Dirichlet(torch.full((TOPICS,), 0.15))
        torch.manual_seed(seed)
        weights = mix.sample((n,))
        self.docs = torch.multinomial(weights @ topics, DOC_LEN, replacement=True, generator=g)

    def __len__(self):
        return len(self.docs)

    def __getitem__(self, i):
        # anchor and positive are random spans of the document
        starts = torch.randint(0, DOC_LEN - SPAN + 1, (2,)).tolist()
        return torch.stack([self.docs[i, s:s + SPAN] for s in starts])


class Encoder(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 128), nn.ReLU(), nn.Linear(128, 32))

    def forward(self, tokens):
        return F.normalize(self.mlp(self.emb(tokens).mean(1)), dim=-1)


def gather_embeddings(z):
    """All embeddings of the global batch; only our own part carries a gradient."""
    parts = [torch.empty_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, z.detach().contiguous())
    parts[dist.get_rank()] = z
    return torch.cat(parts)


def nt_xent(anchors, positives, temperature=0.1):
    z = torch.cat([anchors, positives])
    sim = z @ z.T / temperature
    sim.fill_diagonal_(float("-inf"))
    n = len(anchors)
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(sim, target)


@torch.no_grad()
def retrieval(encoder, docs):
    """First half of a held-out document should find its second half; same work on every rank."""
    a, b = encoder(docs[:, :DOC_LEN // 2]), encoder(docs[:, DOC_LEN // 2:])
    return ((a @ b.T).argmax(1) == torch.arange(len(docs))).float().mean().item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    train, held_out = Documents(1024, 1), Documents(150, 2)
    sampler = DistributedSampler(train, seed=4)
    loader = DataLoader(train, batch_size=64 // world, sampler=sampler, drop_last=True)
    torch.manual_seed(4)
    model = DDP(Encoder())
    torch.manual_seed(4 + rank)  # span positions
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        total = 0.0
        for spans in loader:
            z = model(spans.flatten(0, 1)).view(len(spans), 2, -1)
            anchors, positives = gather_embeddings(z[:, 0]), gather_embeddings(z[:, 1])
            loss = nt_xent(anchors, positives)
            total += loss.item()
            # DDP averages over ranks, and each rank only has the gradient of its own embeddings
            loss = loss * world
            opt.zero_grad()
            loss.backward()
            opt.step()
        score = retrieval(model.module, held_out.docs)
        if rank == 0:
            print(f"epoch {epoch} loss {total / len(loader):.4f} retrieval@1 {score:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
