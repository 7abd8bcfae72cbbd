import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP


def gather_labels(labels):
    out = [torch.empty_like(labels) for _ in range(dist.get_world_size())]
    dist.all_gather(out, labels)
    return torch.cat(out)


def supervised_nce(z, labels, temperature=0.2):
    world, rank, n = dist.get_world_size(), dist.get_rank(), len(z)
    bank = torch.cat(all_gather(z))
    bank_labels = gather_labels(labels)
    logits = z @ bank.t() / temperature
    me = torch.arange(n) + rank * n
    self_mask = F.one_hot(me, n * world).bool()
    positive = (labels.unsqueeze(1) == bank_labels) & ~self_mask
    logp = logits - logits.masked_fill(self_mask, float("-inf")).logsumexp(1, keepdim=True)
    return -((logp * positive).sum(1) / positive.sum(1).clamp(min=1)).mean()


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(18, 48), nn.GELU(), nn.Linear(48, 10))

    def forward(self, x):
        return F.normalize(self.mlp(x), dim=-1)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    centers = torch.randn(6, 18)
    model = DDP(Embedder())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(rank + 40)
    for step in range(20):
        labels = torch.randint(0, 6, (16,), generator=g)
        x = centers[labels] + torch.randn(16, 18, generator=g)
        loss = supervised_nce(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: {loss.item():.4f}")
    dist.destroy_process_group()
