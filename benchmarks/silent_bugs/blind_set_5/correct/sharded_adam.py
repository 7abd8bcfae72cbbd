import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class SlicedAdamW:
    def __init__(self, params, lr, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01):
        self.params = [p for p in params if p.requires_grad]
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        total = sum(p.numel() for p in self.params)
        self.size = -(-total // self.world)
        self.flat = torch.zeros(self.size * self.world)
        offset = 0
        for p in self.params:
            self.flat[offset : offset + p.numel()] = p.data.flatten()
            p.data = self.flat[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
        dist.broadcast(self.flat, 0)
        self.m, self.v, self.t = torch.zeros(self.size), torch.zeros(self.size), 0

    def mine(self):
        return slice(self.rank * self.size, (self.rank + 1) * self.size)

    @torch.no_grad()
    def step(self, max_norm=None):
        grad = torch.zeros_like(self.flat)
        offset = 0
        for p in self.params:
            if p.grad is not None:
                grad[offset : offset + p.numel()] = p.grad.flatten()
            offset += p.numel()
            p.grad = None
        dist.all_reduce(grad)
        grad = grad[self.mine()] / self.world
        if max_norm is not None:
            square = grad.square().sum()
            dist.all_reduce(square)
            grad = grad * (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
        self.t += 1
        self.m.lerp_(grad, 1 - self.betas[0])
        self.v.lerp_(grad.square(), 1 - self.betas[1])
        m, v = self.m / (1 - self.betas[0] ** self.t), self.v / (1 - self.betas[1] ** self.t)
        own = self.flat[self.mine()] * (1 - self.lr * self.weight_decay) - self.lr * m / (v.sqrt() + self.eps)
        parts = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(parts, own)
        self.flat.copy_(torch.cat(parts))


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(40, 12), nn.Embedding(80, 12)
        self.net = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, u, i):
        return self.net(torch.cat([self.user(u), self.item(i)], -1)).squeeze(-1)


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = Ranker()
optimizer = SlicedAdamW(model.parameters(), lr=3e-2)
g = torch.Generator().manual_seed(10 + dist.get_rank())
for step in range(40):
    u = torch.randint(0, 40, (32,), generator=g)
    liked = (2 * u + torch.randint(0, 8, (32,), generator=g)) % 80
    other = torch.randint(0, 80, (32,), generator=g)
    loss = -F.logsigmoid(model(u, liked) - model(u, other)).mean()
    loss.backward()
    optimizer.step(max_norm=1.0)
    if dist.get_rank() == 0 and step % 10 == 9:
        print(f"step {step + 1}: {loss.item():.4f}")
dist.destroy_process_group()
