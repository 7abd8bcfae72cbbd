import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Router(nn.Module):
    def __init__(self, dim, experts, top_k=2):
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.top_k = top_k
        self.register_buffer("expert_bias", torch.zeros(experts))
        self.register_buffer("tokens_per_expert", torch.zeros(experts))

    def forward(self, x):
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.expert_bias).topk(self.top_k, dim=-1).indices
        with torch.no_grad():
            self.tokens_per_expert += torch.bincount(chosen.flatten(), minlength=len(self.expert_bias))
        mask = F.one_hot(chosen, len(self.expert_bias)).sum(-2)
        weights = scores * mask
        return weights / weights.sum(-1, keepdim=True)


class MoE(nn.Module):
    def __init__(self, dim=16, experts=6, classes=8):
        super().__init__()
        self.router = Router(dim, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 24), nn.GELU(), nn.Linear(24, dim)) for _ in range(experts)
        )
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        w = self.router(x)
        y = torch.stack([e(x) for e in self.experts], -2)
        return self.head(x + (w.unsqueeze(-1) * y).sum(-2))


@torch.no_grad()
def update_expert_bias(router, rate):
    counts = router.tokens_per_expert
    dist.all_reduce(counts)
    delta = rate * torch.sign(counts.mean() - counts)
    router.expert_bias.add_(delta - delta.mean())
    counts.zero_()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = DDP(MoE(), broadcast_buffers=False)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(rank)
    for step in range(18):
        x = torch.randn(32, 16, generator=g)
        y = x[:, :8].argmax(1)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        update_expert_bias(model.module.router, rate=0.02)
        if rank == 0 and step % 6 == 5:
            bias = model.module.router.expert_bias
            print(f"step {step + 1} loss {loss.item():.4f} bias range {(bias.max() - bias.min()).item():.3f}")
    dist.destroy_process_group()


main()
