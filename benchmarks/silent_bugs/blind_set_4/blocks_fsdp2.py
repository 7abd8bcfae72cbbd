import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, vocab=50, dim=32, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.out(h)


@torch.no_grad()
def clip_gradients(parameters, limit):
    grads = [p.grad.to_local() for p in parameters if p.grad is not None]
    total = torch.stack([g.pow(2).sum() for g in grads]).sum()
    dist.all_reduce(total)
    norm = total.sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale)
    return norm


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    g = torch.Generator().manual_seed(100 + rank)
    for step in range(16):
        ids = torch.randint(0, 50, (8, 10), generator=g)
        target = (ids * 3 + 1) % 50
        loss = F.cross_entropy(model(ids).flatten(0, 1), target.flatten())
        loss.backward()
        norm = clip_gradients(list(model.parameters()), 0.2)
        opt.step()
        opt.zero_grad()
        if rank == 0 and step % 4 == 3:
            print(f"{step + 1:3d}  loss {loss.item():.4f}  grad norm {norm.item():.4f}")
    dist.destroy_process_group()


main()
