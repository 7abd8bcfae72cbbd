"""Sequence tagging transformer with FSDP2; logs loss, grad norm and the largest gradient value."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SRC, TGT, LENGTH = 40, 12, 16


def make_pairs(n, seed):
    """Target tag depends on the word and on the word before it."""
    g = torch.Generator().manual_seed(seed)
    common = torch.rand(SRC, SRC, generator=torch.Generator().manual_seed(77)) ** 0.4
    table = (TGT * common).long().clamp(max=TGT - 1)        # some tags are much more frequent
    words = torch.randint(0, SRC, (n, LENGTH), generator=g)
    prev = torch.cat([words[:, :1], words[:, :-1]], dim=1)
    return TensorDataset(words, table[words, prev % 4])


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attn_norm = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        h = self.attn_norm(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.mlp_norm(x))


class Tagger(nn.Module):
    def __init__(self, dim=48, heads=4, depth=2):
        super().__init__()
        self.embed = nn.Embedding(SRC, dim)
        self.pos = nn.Parameter(0.1 * torch.randn(LENGTH, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.out = nn.Linear(dim, TGT)

    def forward(self, words):
        x = self.embed(words) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def largest_gradient(parameters):
    """Largest absolute gradient value of the whole model."""
    peak = torch.zeros(())
    for p in parameters:
        grad = p.grad.to_local()
        if grad.numel() > 0:
            peak = torch.maximum(peak, grad.abs().max())
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return peak.item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(0)
    model = Tagger()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    train_set = make_pairs(640, seed=1)
    sampler = DistributedSampler(train_set, seed=4)
    loader = DataLoader(train_set, batch_size=32 // world, sampler=sampler, drop_last=True)

    step = 0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for words, tags in loader:
            loss = F.cross_entropy(model(words).flatten(0, 1), tags.flatten())
            loss.backward()
            peak = largest_gradient(model.parameters())
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            norm = norm.full_tensor().item()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                logged = loss.detach().clone()
                dist.all_reduce(logged)
                if rank == 0:
                    print(f"step {step:3d}  loss {logged.item() / world:.4f}  "
                          f"grad_norm {norm:.4f}  grad_absmax {peak:.5f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
