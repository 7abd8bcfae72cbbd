import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class OrthogonalSGD(torch.optim.Optimizer):
    """Momentum whose update is made nearly orthogonal by Newton-Schulz iterations."""

    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                x = buffer / (buffer.norm() + 1e-7)
                for _ in range(5):
                    x = 1.5 * x - 0.5 * x @ x.t() @ x
                p.add_(x, alpha=-group["lr"])


class TwoHeads(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.tokens = nn.Embedding(50, width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.topic, self.mood = nn.Linear(width, 5), nn.Linear(width, 2)

    def forward(self, ids, with_mood):
        h = self.tokens(ids).mean(1)
        h = h + self.mlp(h)
        return self.topic(h), self.mood(h) if with_mood else None


def texts(count, g):
    topic = torch.randint(0, 5, (count,), generator=g)
    ids = topic[:, None] * 10 + torch.randint(0, 10, (count, 7), generator=g)
    return ids, topic, (ids % 10 > 4).float().mean(1).gt(0.5).long()


def main(steps=40, mood_from=15):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(TwoHeads(), find_unused_parameters=True)
    named = {n.removeprefix("module."): p for n, p in model.named_parameters()}
    matrices = [p for n, p in named.items() if p.ndim == 2 and n.startswith("mlp")]
    others = [p for p in named.values() if not any(p is m for m in matrices)]
    optimizers = [OrthogonalSGD(matrices), torch.optim.AdamW(others, lr=5e-3, weight_decay=0.0)]
    g = torch.Generator().manual_seed(500 + dist.get_rank())
    for step in range(steps):
        with_mood = step >= mood_from
        ids, topic, mood = texts(16, g)
        topic_logits, mood_logits = model(ids, with_mood)
        loss = nn.functional.cross_entropy(topic_logits, topic)
        if with_mood:
            loss = loss + nn.functional.cross_entropy(mood_logits, mood)
        for o in optimizers:
            o.zero_grad(set_to_none=True)
        loss.backward()
        for o in optimizers:
            o.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
