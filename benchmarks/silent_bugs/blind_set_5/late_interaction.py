import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_single_autograd
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class TokenEncoder(nn.Module):
    def __init__(self, vocab=120, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, 32)
        self.mix = nn.Conv1d(32, 32, 3, padding=1)
        self.out = nn.Linear(32, dim, bias=False)

    def encode(self, ids):
        h = self.embed(ids)
        return F.normalize(self.out(h + self.mix(h.transpose(1, 2)).transpose(1, 2).relu()), dim=-1)

    def forward(self, queries, documents):
        return self.encode(queries), self.encode(documents)


def collect(x):
    """The tensors of all ranks, one after the other."""
    parts = [all_gather_single_autograd(x, 0, dist.group.WORLD)]
    return torch.cat(parts)


def max_sim(q, d):
    return torch.einsum("ash,bth->abst", q, d).amax(3).sum(2)


def contrastive(q, d, temperature=0.2):
    scores = max_sim(q, collect(d)) / temperature
    target = torch.arange(len(q)) + dist.get_rank() * len(q)
    return F.cross_entropy(scores, target)


def pairs(count, g):
    documents = torch.randint(0, 120, (count, 14), generator=g)
    pick = torch.stack([torch.randperm(14, generator=g)[:5] for _ in range(count)])
    queries = documents.gather(1, pick)
    other = torch.randint(0, 120, queries.shape, generator=g)
    queries = torch.where(torch.rand(queries.shape, generator=g) < 0.4, other, queries)
    return queries, documents


def main(steps=40, batch=12):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(TokenEncoder())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    g = torch.Generator().manual_seed(90 + rank)
    for step in range(steps):
        loss = contrastive(*model(*pairs(batch, g)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
